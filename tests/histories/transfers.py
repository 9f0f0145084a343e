"""How a connector names blocks: in a transfer job, in its layers, in its host tier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from .findings import Violation
from .memory import CopyEngine


def submit(
    copies: CopyEngine, group_bytes: list[int], job: int, is_store: bool, gpu: Any, cpu: Any
) -> None:
    """Hand a job over to the copy engine, block by block.

    Args:
        copies: of the worker.
        group_bytes: what a GPU block of each group takes on it.
        job: number of the job.
        is_store: from GPU to host, or back.
        gpu: the job's `GPULoadStoreSpec`. Its `block_ids` are those of all groups, one
            after the other; `group_sizes` says how many are whose, and `block_indices`
            where in the request each group's begin (None: where a chunk does).
        cpu: the job's `CPULoadStoreSpec`, the chunks in the same order.
    """
    sizes, first = gpu.group_sizes, gpu.block_indices
    pairs = block_pairs(
        gpu.block_ids.tolist(),
        sizes,
        [0] * len(sizes) if first is None else first,
        cpu.block_ids.tolist(),
        copies.blocks_per_chunk,
    )
    if len(sizes) != len(group_bytes):
        raise Violation(
            "I6", f"a transfer names {len(sizes)} groups; there are {len(group_bytes)}"
        )
    num_bytes = sum(size * each for size, each in zip(sizes, group_bytes))
    copies.submit(job, is_store, *pairs, num_bytes)


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


def layer_specs(config: KVCacheConfig) -> dict[str, KVCacheSpec]:
    """The spec of each layer, also where a group's layers differ."""
    return {
        name: group.kv_cache_spec.kv_cache_specs[name]
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else group.kv_cache_spec
        for group in config.kv_cache_groups
        for name in group.layer_names
    }


@dataclass(frozen=True)
class HostPool:
    """Chunks of the host tier, as the scheduler counts them.

    Attributes:
        references: of each chunk that is in use, -1 while it is being written.
        keys: of the same chunks.
    """

    size: int
    free: int
    references: Callable[[], list[int]]
    keys: Callable[[], list[bytes]]
    resident: int
