"""The least that can be kept and moved, from the layout of the KV cache alone.

A block of any group takes as many bytes as one of any other. To go on after some tokens, a
full-attention group needs the blocks of all of them, a sliding-window group those that the
next token's window reaches.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A KV cache group: tokens in a block, and its window, None for full attention."""

    block_size: int
    window: int | None

    def blocks(self, tokens: int, on_gpu: int = 0) -> int:
        """Blocks to go on after `tokens`, beyond those of the first `on_gpu`."""
        first = 0
        if self.window is not None:
            first = max(0, tokens - self.window + 1) // self.block_size
        first = max(first, on_gpu // self.block_size)
        return max(0, tokens // self.block_size - first)


def prefix_blocks(groups: Iterable[Group], tokens: int, on_gpu: int = 0) -> int:
    return sum(group.blocks(tokens, on_gpu) for group in groups)


def runs(pairs: Iterable[tuple[int, int]]) -> int:
    """Copies that are left when neighbours on both sides are copied together."""
    count, last = 0, None
    for pair in sorted(pairs):
        count += last is None or pair != (last[0] + 1, last[1] + 1)
        last = pair
    return count
