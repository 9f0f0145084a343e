"""How a transfer job names its blocks, and what a host tier reports of itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .findings import Violation


def block_pairs(
    gpu: Sequence[int],
    group_sizes: Sequence[int],
    first_indices: Sequence[int],
    chunks: Sequence[int],
    blocks_per_chunk: int,
) -> tuple[list[int], list[int]]:
    """GPU blocks of a job, and the host blocks that belong to them.

    Each group's GPU blocks follow each other in the request, from its `first_indices` on,
    and lie in chunks that begin at multiples of `blocks_per_chunk`.

    Raises:
        Violation: the job names more chunks, or fewer, than its blocks need.
    """
    host: list[int] = []
    used = 0
    for size, first in zip(group_sizes, first_indices, strict=True):
        if size:
            skip = first % blocks_per_chunk
            count = -(-(skip + size) // blocks_per_chunk)
            slots = [
                chunk * blocks_per_chunk + slot
                for chunk in chunks[used : used + count]
                for slot in range(blocks_per_chunk)
            ]
            host += slots[skip : skip + size]
            used += count
    if used != len(chunks) or len(host) != len(gpu):
        raise Violation(
            "I6",
            f"a transfer of {len(gpu)} GPU blocks ({list(group_sizes)} of each group, from "
            f"{list(first_indices)} on) names {len(chunks)} host chunks of "
            f"{blocks_per_chunk} blocks; it needs {used}",
        )
    return list(gpu), host


@dataclass(frozen=True)
class HostPool:
    """Chunks of the host tier, as the scheduler counts them.

    Attributes:
        references: of each chunk that is in use, -1 while it is being written.
    """

    size: int
    free: int
    references: Callable[[], list[int]]
    resident: int
