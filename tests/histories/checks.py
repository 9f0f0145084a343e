"""The invariants, checked on every copy, after every step and at the end of a history."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from .findings import Violation
from .memory import Copy, CopyEngine, total

if TYPE_CHECKING:
    from .model import Batch
    from .world import World

# Counting every reference is slow on a large pool.
_STEPS_BETWEEN_COUNTS = 8


def copy(world: World, copies: CopyEngine, copy: Copy) -> None:
    """Look at a copy: when it begins, and when it is done."""
    if copy.is_store:
        if not copy.done:
            _store_begins(world, copies, copy)
    elif copy.done:
        _load_is_done(world, copies, copy)
    else:
        _load_begins(world, copies, copy)


def _where(world: World, copies: CopyEngine, copy: Copy, request: str) -> str:
    worker = f" on worker {copies.worker}" if len(world.copies) > 1 else ""
    return f"step {world.now}: {copy.name} of {request}{worker}"


def _store_begins(world: World, copies: CopyEngine, copy: Copy) -> None:
    """I2: every source block holds the request's own KV, complete, and goes to its slot."""
    worker = world.engine.workers[copies.worker]
    name = world.pin.job_owner(worker.connector, world.jobs, copy.job)
    stream, gpu = world.streams[name], copies.gpu
    groups, indices = gpu.group[copy.gpu], gpu.index[copy.gpu]
    for i in np.flatnonzero(copy.seen == 0)[:1]:
        raise Violation(
            "I2",
            f"{_where(world, copies, copy, name)} reads GPU block {copy.gpu[i]}, which holds "
            f"{gpu.describe(copy.gpu[i])}",
        )
    for group in world.engine.groups:
        mine = np.flatnonzero(groups == group.number)
        ends = (indices[mine] + 1) * group.block_size
        inside = ends <= len(stream)
        right = np.zeros(len(mine), dtype=bool)
        right[inside] = copy.seen[mine[inside]] == stream.labels(group.number, ends[inside])
        for i in mine[~right][:1]:
            raise Violation(
                "I2",
                f"{_where(world, copies, copy, name)} reads GPU block {copy.gpu[i]}, which "
                f"holds {gpu.describe(copy.gpu[i])}: not what {name} has there, or not all "
                "of it",
            )
    factor = copies.blocks_per_chunk
    for i in np.flatnonzero(indices % factor != copy.host % factor)[:1]:
        raise Violation(
            "I6",
            f"{_where(world, copies, copy, name)} puts block {indices[i]} of group "
            f"{groups[i]} into slot {copy.host[i] % factor} of its host chunk; a load will "
            f"look for it in slot {indices[i] % factor}",
        )


def _load_begins(world: World, copies: CopyEngine, copy: Copy) -> None:
    worker = world.engine.workers[copies.worker]
    name = world.pin.job_owner(worker.connector, world.jobs, copy.job)
    copy.owner = name
    where = _where(world, copies, copy, name)
    _place_blocks(world, copy, where)
    world.loaded[copies.worker][copy.gpu] = True
    for i in np.flatnonzero(copy.seen == 0)[:1]:
        raise Violation(
            "I1",
            f"{where} reads host block {copy.host[i]} for block {copy.indices[i]} of group "
            f"{copy.groups[i]}; it holds {copies.host.describe(copy.host[i])}",
        )
    is_sync = name in world.starts
    if not is_sync:
        _check_nobody_else_sees(world, copy, where)
    _check_needed(world, copy, where)


def _place_blocks(world: World, copy: Copy, where: str) -> None:
    """Find the blocks of a load in the tables of its request."""
    tables = world.scheduler.kv_cache_manager.get_block_ids(copy.owner)
    place = np.full(world.engine.num_blocks, -1, dtype=np.int64)
    group_of = np.full(world.engine.num_blocks, -1, dtype=np.int16)
    for group, table in zip(world.engine.groups, tables, strict=True):
        ids = np.array(table, dtype=np.int64)
        place[ids] = np.arange(len(ids))
        group_of[ids] = group.number
    copy.groups, copy.indices = group_of[copy.gpu], place[copy.gpu]
    for block in copy.gpu[copy.groups < 0][:1]:
        raise Violation(
            "I3", f"{where} writes GPU block {block}, which does not belong to {copy.owner}"
        )


def _check_nobody_else_sees(world: World, copy: Copy, where: str) -> None:
    """I3: in no other request's table, and not in the prefix cache."""
    manager = world.scheduler.kv_cache_manager
    written = np.zeros(world.engine.num_blocks, dtype=bool)
    written[copy.gpu] = True
    for name in world.scheduler.requests:
        if name == copy.owner:
            continue
        for table in manager.get_block_ids(name):
            ids = np.array(table, dtype=np.int64)
            for block in ids[written[ids]][:1]:
                raise Violation(
                    "I3", f"{where} writes GPU block {block}, which {name} uses as well"
                )
    for block in copy.gpu.tolist():
        if manager.block_pool.blocks[block].block_hash is not None:
            raise Violation(
                "I3", f"{where} writes GPU block {block}, which is in the prefix cache already"
            )


def step_begins(world: World, batch: Batch) -> None:
    """I7: images whose tokens look at each other are computed as far as they end."""
    if not world.settings.bidirectional:
        return
    for work in batch.works:
        for image in world.requests[work.name].mm_features:
            first, length = image.mm_position.offset, image.mm_position.length
            if first < work.stop < first + length:
                raise Violation(
                    "I7",
                    f"step {world.now}: {work.name} computes {work.start} to {work.stop}, "
                    f"which ends within an image of {length} tokens from {first} on; they look "
                    f"at each other in both directions",
                )


def _check_needed(world: World, copy: Copy, where: str) -> None:
    """I6 and I7: the load brings what the request lacks at the point where it resumes."""
    request = world.requests[copy.owner]
    stop = world.starts.get(copy.owner, request.num_computed_tokens)
    start = stop - world.external_tokens[copy.owner]
    common = math.lcm(*(group.block_size for group in world.engine.groups))
    aligned = stop % common == 0 or not world.pin.HITS_ARE_ALIGNED
    if not aligned or stop > request.num_tokens:
        raise Violation(
            "I7",
            f"{where} ends at token {stop} of {request.num_tokens}; the groups' blocks have "
            f"common boundaries at multiples of {common}",
        )
    resume = min(stop, request.num_tokens - 1)
    tables = world.scheduler.kv_cache_manager.get_block_ids(copy.owner)
    for group, table in zip(world.engine.groups, tables, strict=True):
        first = max(group.first_needed(resume), start // group.block_size)
        lacking = np.arange(first, -(-stop // group.block_size))
        moved = copy.indices[copy.groups == group.number]
        for index in np.setdiff1d(lacking, moved)[:1]:
            raise Violation(
                "I6",
                f"{where} leaves out block {index} of group {group.number}, which "
                f"{copy.owner}, with {start} tokens on the GPU, needs when it resumes at token "
                f"{resume}" + ("" if table[index] else "; the table has no block there"),
            )
        for index in np.setdiff1d(moved, lacking)[:1]:
            raise Violation(
                "I6",
                f"{where} brings block {index} of group {group.number}, which {copy.owner}, "
                f"with {start} tokens on the GPU, does not need when it resumes at token "
                f"{resume}",
            )


def _load_is_done(world: World, copies: CopyEngine, copy: Copy) -> None:
    """I1: every block that was loaded holds the request's own KV."""
    stream, gpu = world.streams[copy.owner], copies.gpu
    for group in world.engine.groups:
        mine = np.flatnonzero(copy.groups == group.number)
        ends = np.minimum((copy.indices[mine] + 1) * group.block_size, len(stream))
        wrong = gpu.label[copy.gpu[mine]] != stream.labels(group.number, ends)
        for i in mine[wrong][:1]:
            raise Violation(
                "I1",
                f"{_where(world, copies, copy, copy.owner)} brought host block "
                f"{copy.host[i]} to block {copy.indices[i]} of group {group.number}; it holds "
                f"{gpu.describe(copy.gpu[i])}, not of {copy.owner}",
            )


# --- after every step ---


def between_steps(world: World) -> None:
    """I8: the pools' books add up, and no block in use is free."""
    pool = world.pin.host_pool(world.scheduler.connector)
    if pool.free + pool.resident != pool.size or pool.free < 0:
        raise Violation(
            "I8",
            f"step {world.now}: the host tier has {pool.size} chunks; {pool.free} are free "
            f"and {pool.resident} in use",
        )
    if world.now % _STEPS_BETWEEN_COUNTS == 0:
        _check_references(world)


def _check_references(world: World) -> None:
    manager = world.scheduler.kv_cache_manager
    in_use = [
        block
        for name in world.scheduler.requests
        for table in manager.get_block_ids(name)
        for block in table
    ]
    counts = np.bincount(in_use, minlength=1)
    blocks = manager.block_pool.blocks
    for block in np.flatnonzero(counts).tolist():
        if block and blocks[block].ref_cnt < counts[block]:
            raise Violation(
                "I8",
                f"step {world.now}: {counts[block]} requests use GPU block {block}, which has "
                f"{blocks[block].ref_cnt} references",
            )


def statistics(world: World, stats: Any) -> None:
    """Counters never go backwards."""
    if stats.kv_connector_stats:
        for kind, moved in world.pin.moved_bytes(stats.kv_connector_stats).items():
            if moved < 0:
                raise Violation("metrics", f"step {world.now}: {moved} bytes in {kind}s")
            world.reported[kind] += moved
        _note_chunk_counts(world, stats.kv_connector_stats)
    cache = stats.connector_prefix_cache_stats
    if cache is not None:
        if not 0 <= cache.hits <= cache.queries:
            raise Violation(
                "metrics",
                f"step {world.now}: {cache.hits} external hits in {cache.queries} queries",
            )
        world.external["queries"] += cache.queries
        world.external["hits"] += cache.hits


def _note_chunk_counts(world: World, stats: dict[str, Any]) -> None:
    chunks = world.pin.chunk_counts(stats)
    if chunks is None:
        return
    if min(map(min, chunks.values())) < 0:
        raise Violation("metrics", f"step {world.now}: {chunks} chunks per group")
    world.reported_chunks = chunks["offloaded"]


# --- at the end ---


# Where requests have ended: of no more than so many.
_OUTLIVES_REQUESTS = {"_request_ends"}


def state_sizes(world: World) -> dict[str, int]:
    """Sizes of all collections in which the connectors keep the state of requests."""
    connectors = [world.scheduler.connector, *(w.connector for w in world.engine.workers)]
    return {
        f"{type(part).__name__}.{name}": len(value)
        for connector in connectors
        for part in (connector.connector_scheduler, connector.connector_worker)
        if part is not None
        for name, value in vars(part).items()
        if isinstance(value, dict | set | list | deque) and name not in _OUTLIVES_REQUESTS
    }


def is_at_rest(world: World) -> bool:
    return (
        not world.scheduler.requests
        and not any(copies.pending for copies in world.copies)
        and state_sizes(world) == world.at_rest
    )


def at_end(world: World) -> None:
    """I4, I5, I8 and the metrics, when every request has ended and every copy is done."""
    if left := list(world.scheduler.requests):
        raise Violation("I8", f"{left[0]} has ended, but the scheduler still keeps it")
    for copies in world.copies:
        for copy in copies.pending:
            raise Violation("I8", f"{copy.name} was submitted and nobody asks for it")
    for name, size in state_sizes(world).items():
        if size != world.at_rest[name]:
            raise Violation("I8", f"{name} has {size} entries when nothing is left to do")
    _check_gpu_pool(world)
    _check_host_pool(world)
    _check_chunk_counts(world)
    _check_tokens(world)
    for kind, ledgers in (
        ("store", [copies.stored for copies in world.copies]),
        ("load", [copies.loaded for copies in world.copies]),
    ):
        moved = total(ledgers).bytes
        if world.reported[kind] != moved:
            raise Violation(
                "metrics",
                f"the statistics report {world.reported[kind]} bytes of {kind}s; {moved} bytes "
                "were moved",
            )


def _check_gpu_pool(world: World) -> None:
    pool = world.scheduler.kv_cache_manager.block_pool
    in_use = [b.block_id for b in pool.blocks[1:] if b.ref_cnt]
    if in_use or pool.get_num_free_blocks() != world.engine.num_blocks - 1:
        raise Violation(
            "I8",
            f"nothing is left to do, and {pool.get_num_free_blocks()} of "
            f"{world.engine.num_blocks - 1} GPU blocks are free; in use: {in_use[:8]}",
        )


def _check_host_pool(world: World) -> None:
    pool = world.pin.host_pool(world.scheduler.connector)
    if busy := [references for references in pool.references() if references]:
        raise Violation(
            "I8",
            f"nothing is left to do, and {len(busy)} host chunks are being read or written; "
            f"their references: {busy[:8]}",
        )
    for copies in world.copies:
        size = len(copies.host) // copies.blocks_per_chunk
        if size != pool.size:
            raise Violation(
                "I4",
                f"the scheduler counts {pool.size} host chunks, worker {copies.worker} has "
                f"{size}",
            )
    if pool.size != world.engine.host_chunks:
        raise Violation(
            "I5",
            f"the host tier has {pool.size} chunks; {world.engine.host_chunks} were asked for",
        )


def _check_chunk_counts(world: World) -> None:
    """The last word on the chunks of each group agrees with the host tier."""
    connector = world.scheduler.connector
    if unreported := connector.get_kv_connector_stats():
        _note_chunk_counts(world, unreported.data)
    if world.reported_chunks is None:
        return
    keys = world.pin.host_pool(connector).keys()
    groups = len(world.engine.groups)
    # The key of a chunk ends with the number of its group, if there are several.
    numbers = [int.from_bytes(key[-4:], "big") if groups > 1 else 0 for key in keys]
    counted = np.bincount(numbers, minlength=groups).tolist()
    if world.reported_chunks != counted:
        raise Violation(
            "metrics",
            f"the statistics report {world.reported_chunks} chunks, per group; the host tier "
            f"has {counted}",
        )


def _check_tokens(world: World) -> None:
    """I1: what was delivered is what the model said."""
    for name, request in world.requests.items():
        said = world.streams[name].tokens[: request.num_tokens]
        if list(request.all_token_ids) != said:
            raise Violation("I1", f"{name} was given other tokens than the model made")
        aborted = request.status == RequestStatus.FINISHED_ABORTED
        if not aborted and request.num_output_tokens != world.answers[name]:
            raise Violation(
                "I8",
                f"{name} ended as {request.status.name} after {request.num_output_tokens} of "
                f"{world.answers[name]} tokens",
            )
