"""Answers of engines that store and reload, token for token those of a cold one."""

import pytest
from cases import KNOWN_FAULTS, SEED, SMOKE, known_fault
from environment import RELEASE


@pytest.mark.parametrize("name", SMOKE)
def test_case(run, name):
    outcome = run(name)
    if outcome.failures and (known := known_fault(name)):
        pytest.xfail(known)
    repeat = f"repeat: python -m tests.engine --seed {SEED} --case {name}"
    assert not outcome.failures, "\n".join([str(outcome), *outcome.failures[:20], repeat])


@pytest.mark.parametrize("fault", KNOWN_FAULTS[RELEASE], ids=lambda fault: fault.case)
def test_known_fault(run, fault):
    outcome = run(fault.case, fault.seed)
    assert outcome.failures, f"mended, so take it out of cases.KNOWN_FAULTS: {fault.what}"
