"""What the bed reports."""

# What each invariant says; the numbers are those of the project's design notes.
INVARIANTS = {
    "I1": "a request computes on exactly the KV of its own tokens",
    "I2": "a copy reads what it was made for, and its source stays as it is until it is done",
    "I3": "a load writes a block that nobody else can see, and only while it is its own",
    "I4": "scheduler and workers agree on the pools; every block id lies inside its pool",
    "I5": "the host tier has the size that was asked for",
    "I6": "a transfer moves the blocks that are needed, all of them and no other",
    "I7": "a hit ends at a common block boundary and leaves a token; no image is split",
    "I8": "every request ends, and nothing is left behind",
    "metrics": "counters never go backwards and agree with the bytes that were moved",
    "crash": "vLLM runs without an error",
}


class Violation(BaseException):
    """An invariant does not hold.

    Not an `Exception`: parts of vLLM catch those around a transfer and go on.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant
        self.message = message
