"""Histories that once broke something, and which faults the tree under test still has.

Each is a file in `regressions/<pin>`. While the tree has the fault, the file says how it
shows, and in which cases random histories meet it:

    "breaks": {"invariant": "I8", "message": "waits for ever", "cases": ["tight-*"]}

Such a finding is no news there. Whoever mends the fault takes "breaks" out of the file;
its test asks for that.
"""

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from .findings import Violation
from .history import History

_FOLDER = Path(__file__).parent / "regressions"


@dataclass(frozen=True)
class Fault:
    """How a fault shows: the invariant, a regular expression for the message, the cases."""

    invariant: str
    message: str
    cases: tuple[str, ...] = ()

    def explains(self, violation: Violation) -> bool:
        return violation.invariant == self.invariant and bool(
            re.search(self.message, violation.message)
        )


@dataclass(frozen=True)
class Saved:
    """A saved history; `fault` is None once it is mended."""

    path: Path
    history: History
    fault: Fault | None


def saved_histories(pin: str) -> list[Saved]:
    result = []
    for path in sorted((_FOLDER / pin).glob("*.json")):
        breaks = json.loads(path.read_text()).get("breaks")
        fault = Fault(**breaks) if breaks else None
        result.append(Saved(path, History.load(path), fault))
    return result


def is_known(pin: str, case: str, violation: Violation) -> bool:
    """Whether a random history of the case broke what is known to break there."""
    return any(
        one.fault.explains(violation)
        for one in saved_histories(pin)
        if one.fault and any(fnmatch(case, pattern) for pattern in one.fault.cases)
    )
