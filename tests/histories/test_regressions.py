"""Histories that once broke something, replayed."""

import pytest

from . import pins
from .known_faults import Saved, saved_histories
from .shrink import failure_of


@pytest.mark.parametrize(
    "saved", saved_histories(pins.current().TAG), ids=lambda saved: saved.path.stem
)
def test_regression(saved: Saved) -> None:
    violation = failure_of(saved.history)
    if saved.fault is not None and violation is None:
        pytest.fail(f'{saved.path} passes now: take "breaks" out of it')
    if violation is not None and not (saved.fault and saved.fault.explains(violation)):
        pytest.fail(f"{violation}\npython -m tests.histories --replay {saved.path}")
