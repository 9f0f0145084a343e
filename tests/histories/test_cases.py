"""Every kind of history, a few of each; `python -m tests.histories` replays more."""

import pytest

from . import cases, pins
from .findings import INVARIANTS
from .known_faults import is_known
from .world import Report

PIN = pins.current().TAG
COUNT = 8
COUNT_AT_REAL_SCALE = 1
# Cases that would test too little if nothing came back from the host.
_RELOADS = {
    "gemma4-31b",
    "gemma4-12b",
    "gemma4-e4b",
    "gemma4-e2b",
    "one-group",
    "two-groups",
    "tight-gpu",
    "slow-copies",
}


@pytest.mark.parametrize("case", cases.cases_of(PIN))
def test_case(case: str) -> None:
    report, geometries = Report(), cases.geometries_of(case)
    always_real = cases.CASES[case].get("window_divisor") == 1
    for seed in range(COUNT // 2 if always_real else COUNT):
        geometry = geometries[seed % len(geometries)]
        given = {"window_divisor": 1} if seed < COUNT_AT_REAL_SCALE else {}
        part, violation = cases.try_history(cases.history(case, geometry, seed, **given))
        report.add(part)
        if violation is not None and not is_known(PIN, case, violation):
            pytest.fail(
                f"{violation}\nThat is: {INVARIANTS[violation.invariant]}.\n"
                f"{cases.command(case, geometry, seed, **given)}"
            )
    if case in _RELOADS:
        assert report.loads, "no block came back from the host"
