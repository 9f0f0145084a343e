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
    """The tokens of one request: its prompt, then what the fake model made of it.

    Args:
        prompt: its tokens.
        images: names of the images that begin at some of them; the KV from there on is of
            this image and no other.
        kind: what else tells it apart from requests with the same tokens.
    """

    def __init__(
        self, prompt: np.ndarray, images: dict[int, str] | None = None, kind: str = ""
    ) -> None:
        self.images, self.kind = images or {}, kind
        self.prompt_length = len(prompt)
        self.tokens: list[int] = prompt.tolist()
        size = len(prompt) + 1
        # At index i, what stands for the first i tokens: a sum that can be continued, and
        # the same, spread.
        self._sums = np.zeros(size + 64, dtype=np.uint64)
        values = prompt.astype(np.uint64)
        for place, name in self.images.items():
            values[place] += np.uint64(zlib.crc32(name.encode()) << 20)
        values[0] += np.uint64(zlib.crc32(kind.encode()) << 24)
        np.cumsum(values * _weights(len(prompt)), out=self._sums[1:size])
        self.marks = np.zeros(size + 64, dtype=np.uint64)
        self.marks[:size] = _mix(self._sums[:size])

    def __len__(self) -> int:
        return len(self.tokens)

    def grow_to(self, length: int) -> None:
        """Append what a greedy model would say next: a function of all tokens so far."""
        while len(self.tokens) < length:
            end = len(self.tokens)
            if end + 1 >= len(self._sums):
                self._sums = np.resize(self._sums, 2 * len(self._sums))
                self.marks = np.resize(self.marks, 2 * len(self.marks))
            so_far = int(self._sums[end])
            token = (so_far * _GOLDEN & _MASK) % VOCABULARY + 1
            weight = int(_weights(end + 1)[end])
            self._sums[end + 1] = (so_far + token * weight) & _MASK
            self.marks[end + 1] = _mix(self._sums[end + 1 : end + 2])[0]
            self.tokens.append(token)

    def answer(self, count: int) -> list[int]:
        """So many tokens after the prompt, none of which is said yet."""
        whole = Stream(np.array(self.tokens), self.images, self.kind)
        whole.grow_to(self.prompt_length + count)
        return whole.tokens[self.prompt_length :]

    def labels(self, group: int, ends: np.ndarray | slice | int) -> np.ndarray:
        """Labels of blocks of `group` that hold tokens up to (not including) `ends`."""
        return labels_of(self.marks[ends], group)


def labels_of(marks: np.ndarray, group: np.ndarray | int) -> np.ndarray:
    """Labels of blocks that end where a stream has these marks."""
    return (marks | _ONE) ^ _SALTS[group]
