"""Faults that the trees under test still have; a test asks to take out what is fixed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFault:
    """One way in which the histories of a case fail.

    Attributes:
        case: name in `cases.CASES`.
        invariant: that is broken.
        seed: of a history that breaks it.
        what: goes wrong.
    """

    case: str
    invariant: str
    seed: int
    what: str


KNOWN_FAULTS: dict[str, list[KnownFault]] = {"v0.19.1": [], "v0.33.0": []}
