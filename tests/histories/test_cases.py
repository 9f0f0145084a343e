"""Every kind of history, a few of each; `python -m tests.histories` replays more."""

import pytest

from . import cases, pins
from .findings import INVARIANTS
from .known_faults import is_known
from .world import Report

PIN = pins.current().TAG
COUNT = 4
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
    for seed in range(COUNT):
        geometry = geometries[seed % len(geometries)]
        part, violation = cases.try_history(cases.history(case, geometry, seed))
        report.add(part)
        if violation is not None and not is_known(PIN, case, violation):
            pytest.fail(
                f"{violation}\nThat is: {INVARIANTS[violation.invariant]}.\n"
                f"{cases.command(case, geometry, seed)}"
            )
    if case in _RELOADS:
        assert report.loads, "no block came back from the host"
