"""Every kind of history, a few of each: `HISTORIES=200` for more."""

import os

import pytest

from . import cases, known_faults, pins
from .findings import INVARIANTS
from .shrink import failure_of

PIN = pins.current().TAG
COUNT = int(os.environ.get("HISTORIES", "4"))
# Cases in which so few blocks survive in the host tier that nothing may come back.
_FEW_LOADS = {"tight-host", "tight-host-one-group", "resets-one-group", "long-context"}


@pytest.mark.parametrize("case", cases.cases_of(PIN))
def test_case(case: str) -> None:
    known = {
        fault.invariant: fault for fault in known_faults.KNOWN_FAULTS[PIN] if fault.case == case
    }
    report, failures = cases.run_case(case, range(COUNT))
    for seed, violation in failures.items():
        if violation.invariant not in known:
            pytest.fail(
                f"{violation}\nThat is: {INVARIANTS[violation.invariant]}.\n"
                f"python -m tests.histories --case {case} --seed {seed} --histories 1"
            )
    for fault in known.values():
        violation = failures.get(fault.seed) or failure_of(cases.history(case, fault.seed))
        if violation is None or violation.invariant != fault.invariant:
            pytest.fail(
                f"the known fault of {case}, seed {fault.seed} ({fault.what}) does not break "
                f"{fault.invariant} any more but {violation or 'nothing'}: take it out of "
                "known_faults.py, or name another seed"
            )
    if not known and case not in _FEW_LOADS:
        assert report.loads, "no block came back from the host: this case tests too little"
