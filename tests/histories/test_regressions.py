"""Histories that once broke something, replayed.

A file may say `"breaks": "I2"` while the tree under test still has the fault.
"""

import json
from pathlib import Path

import pytest

from . import pins
from .history import History
from .shrink import failure_of

_FOLDER = Path(__file__).parent / "regressions" / pins.current().TAG


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_regression(path: Path) -> None:
    expected = json.loads(path.read_text()).get("breaks")
    violation = failure_of(History.load(path))
    broken = violation.invariant if violation else None
    if expected and broken is None:
        pytest.fail(f'{path.name} passes now: take "breaks" out of it')
    assert broken == expected, f"python -m tests.histories --replay {path}\n{violation}"
