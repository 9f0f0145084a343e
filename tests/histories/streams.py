"""Token sequences, and the label that a block of KV must carry for each of them.

The KV of a token depends on every token before it. A label therefore stands for a whole
prefix: two blocks have the same label exactly when they hold the KV of the same tokens, at
the same position, of the same KV cache group.
"""

import zlib

import numpy as np

VOCABULARY = 100_000
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(values: np.ndarray) -> np.ndarray:
    """Spread 64-bit values (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _counter(size: int, key: int) -> np.ndarray:
    steps = np.arange(1, size + 1, dtype=np.uint64)
    return _mix(steps * np.uint64(_GOLDEN) + np.uint64(key & _MASK))


# A label is never 0, which means that there is none.
_ONE = np.uint64(1)
_SALTS = _counter(64, key=2) & ~_ONE
_WEIGHTS = _counter(1 << 10, key=1) | np.uint64(1)


def _weights(size: int) -> np.ndarray:
    """One odd factor per position; the same for every stream."""
    global _WEIGHTS
    if size > len(_WEIGHTS):
        _WEIGHTS = _counter(max(size, 2 * len(_WEIGHTS)), key=1) | np.uint64(1)
    return _WEIGHTS[:size]


def text(name: str, length: int) -> np.ndarray:
    """The first tokens of the text called `name`; every length is a prefix of the next."""
    spread = _counter(length, key=zlib.crc32(name.encode()) << 20)
    return (spread % np.uint64(VOCABULARY)).astype(np.int64) + 1


class Stream:
    """The tokens of one request: its prompt, then what the fake model made of it."""

    def __init__(self, prompt: np.ndarray) -> None:
        self.prompt_length = len(prompt)
        self.tokens: list[int] = prompt.tolist()
        size = len(prompt) + 1
        # At index i, what stands for the first i tokens: a sum that can be continued, and
        # the same, spread.
        self._sums = np.zeros(size + 64, dtype=np.uint64)
        np.cumsum(prompt.astype(np.uint64) * _weights(len(prompt)), out=self._sums[1:size])
        self._marks = np.zeros(size + 64, dtype=np.uint64)
        self._marks[:size] = _mix(self._sums[:size])

    def __len__(self) -> int:
        return len(self.tokens)

    def grow_to(self, length: int) -> None:
        """Append what a greedy model would say next: a function of all tokens so far."""
        while len(self.tokens) < length:
            end = len(self.tokens)
            if end + 1 >= len(self._sums):
                self._sums = np.resize(self._sums, 2 * len(self._sums))
                self._marks = np.resize(self._marks, 2 * len(self._marks))
            so_far = int(self._sums[end])
            token = (so_far * _GOLDEN & _MASK) % VOCABULARY + 1
            weight = int(_weights(end + 1)[end])
            self._sums[end + 1] = (so_far + token * weight) & _MASK
            self._marks[end + 1] = _mix(self._sums[end + 1 : end + 2])[0]
            self.tokens.append(token)

    def labels(self, group: int, ends: np.ndarray | slice | int) -> np.ndarray:
        """Labels of blocks of `group` that hold tokens up to (not including) `ends`."""
        return (self._marks[ends] | _ONE) ^ _SALTS[group]

    def block_labels(self, group: int, block_size: int, first: int, last: int) -> np.ndarray:
        """Labels of the blocks `first` to `last` (not included), all of them full."""
        if last * block_size > len(self.tokens):
            raise ValueError(f"{last} blocks of {block_size} exceed {len(self)} tokens")
        return self.labels(
            group, slice((first + 1) * block_size, last * block_size + 1, block_size)
        )
