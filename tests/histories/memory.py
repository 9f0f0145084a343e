"""Block memories that hold labels, and the copies between them.

The copies are as unkind as a real backend may be: they finish late, workers finish at
different times, the source is read at the last moment, and whatever is free or on its way
holds no label at all.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from .findings import Violation
from .history import Settings

NO_LABEL = 0
UNWRITTEN, NEW_OWNER, LOADING, STORING = -1, -2, -3, -4
_WHY_NO_LABEL = {
    UNWRITTEN: "nothing was ever written",
    NEW_OWNER: "nothing, since it was given to a new owner",
    LOADING: "nothing yet, a load into it is under way",
    STORING: "nothing yet, a store into it is under way",
}

# How late a copy is that nobody waits for.
LAZY_STEPS = 200


class BlockMemory:
    """A pool of blocks, each with the label of the KV in it.

    `group` and `index` say which block of a request that is; for a block without a
    label, `index` says why.
    """

    def __init__(self, size: int) -> None:
        self.label = np.zeros(size, dtype=np.uint64)
        self.group = np.full(size, -1, dtype=np.int16)
        self.index = np.full(size, UNWRITTEN, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.label)

    def clear(self, blocks: np.ndarray | list[int], why: int) -> None:
        self.label[blocks] = NO_LABEL
        self.group[blocks] = -1
        self.index[blocks] = why

    def write(
        self,
        blocks: np.ndarray | int,
        group: int,
        index: np.ndarray | int,
        label: np.ndarray,
    ) -> None:
        self.label[blocks] = label
        self.group[blocks] = group
        self.index[blocks] = index

    def copy_from(self, source: "BlockMemory", here: np.ndarray, there: np.ndarray) -> None:
        self.label[here] = source.label[there]
        self.group[here] = source.group[there]
        self.index[here] = source.index[there]

    def describe(self, block: int) -> str:
        if self.label[block] == NO_LABEL:
            return _WHY_NO_LABEL[int(self.index[block])]
        return f"block {self.index[block]} of some request in group {self.group[block]}"


@dataclass(eq=False)
class Copy:
    """One transfer job of one worker: GPU block `gpu[i]` and host block `host[i]`."""

    job: int
    is_store: bool
    gpu: np.ndarray
    host: np.ndarray
    num_bytes: int
    due: int
    # How often each GPU block had been handed out when the copy was submitted.
    owners: np.ndarray
    failed: bool = False
    # The source as it was when the copy began; None while it waits for the GPU.
    seen: np.ndarray | None = None
    # Of a load: whose it is, and each block's group and index in that request.
    owner: str = ""
    groups: np.ndarray | None = None
    indices: np.ndarray | None = None
    done: bool = False

    @property
    def name(self) -> str:
        return f"{'store' if self.is_store else 'load'} {self.job}"


@dataclass
class Ledger:
    """What the copies of one worker amounted to."""

    jobs: int = 0
    blocks: int = 0
    bytes: int = 0


class CopyEngine:
    """The copies of one worker.

    Args:
        settings: of the history.
        worker: rank of the worker.
        gpu: labels of the GPU pool.
        now: number of the engine's step.
        owner_changes: how often each GPU block was handed out.
        gpu_is_behind: whether the GPU still has a step to run.
        catch_up: lets the GPU run it.
        check: looks at a copy, first when it begins and then when it is done.
    """

    loads_wait_for_steps = False

    def __init__(
        self,
        settings: Settings,
        worker: int,
        gpu: BlockMemory,
        now: Callable[[], int],
        owner_changes: np.ndarray,
        gpu_is_behind: Callable[[], bool],
        catch_up: Callable[[], None],
        check: Callable[["CopyEngine", Copy], None],
    ) -> None:
        self.settings = settings
        self.worker = worker
        self.gpu = gpu
        self.host = BlockMemory(0)
        self.blocks_per_chunk = 1
        self.stored, self.loaded = Ledger(), Ledger()
        self._now = now
        self._owner_changes = owner_changes
        self._gpu_is_behind = gpu_is_behind
        self._catch_up = catch_up
        self._check = check
        self._pending: dict[bool, deque[Copy]] = {True: deque(), False: deque()}
        self._finished: dict[bool, list[Copy]] = {True: [], False: []}
        self._count = 0
        # Copies that are using each block; of the host tier, each chunk.
        self._readers = {True: np.zeros(len(gpu), dtype=np.int32)}
        self._writers = {True: np.zeros(len(gpu), dtype=np.int32)}

    def allocate(self, chunks: int, blocks_per_chunk: int) -> None:
        """Make the host tier."""
        self.host = BlockMemory(chunks * blocks_per_chunk)
        self.blocks_per_chunk = blocks_per_chunk
        self._readers[False] = np.zeros(chunks, dtype=np.int32)
        self._writers[False] = np.zeros(chunks, dtype=np.int32)

    @property
    def pending(self) -> list[Copy]:
        return [copy for queue in self._pending.values() for copy in queue]

    def submit(
        self, job: int, is_store: bool, gpu: list[int], host: list[int], num_bytes: int
    ) -> None:
        """Start to copy GPU blocks to host blocks (of GPU block size), or back."""
        gpu_ids = np.array(gpu, dtype=np.int64)
        host_ids = np.array(host, dtype=np.int64)
        what = f"{'store' if is_store else 'load'} {job}"
        self._check_ids(gpu_ids, host_ids, what)
        self._count += 1
        fail_every = self.settings.fail_every
        copy = Copy(
            job=job,
            is_store=is_store,
            gpu=gpu_ids,
            host=host_ids,
            num_bytes=num_bytes,
            due=self._due(is_store),
            owners=self._owner_changes[gpu_ids].copy(),
            failed=bool(fail_every) and self._count % fail_every == 0,
        )
        self._check_conflicts(copy)
        if is_store:
            factor = self.blocks_per_chunk
            slots = (host_ids // factor * factor)[:, None] + np.arange(factor)
            self.host.clear(slots.ravel(), STORING)
        self._count_uses(copy, 1)
        self._pending[is_store].append(copy)
        # A store waits for the steps launched before it; not every release's load does.
        waits = is_store or self.loads_wait_for_steps
        if not (waits and self._gpu_is_behind()):
            self._begin(copy)

    def begin_copies(self) -> None:
        """Begin the copies that waited for the GPU, which has caught up."""
        for copy in (*self._pending[True], *self._pending[False]):
            if copy.seen is None:
                self._begin(copy)

    def wait(self, is_store: bool, jobs: Collection[int]) -> None:
        """Finish these jobs, and with them the earlier ones in the same direction."""
        queue = self._pending[is_store]
        last = max((i for i, copy in enumerate(queue) if copy.job in jobs), default=-1)
        for _ in range(last + 1):
            self._finish(queue.popleft())

    def poll(self, is_store: bool) -> list[Copy]:
        """The copies in one direction that were finished since the last call."""
        queue = self._pending[is_store]
        while queue and queue[0].due <= self._now():
            self._finish(queue.popleft())
        finished, self._finished[is_store] = self._finished[is_store], []
        return finished

    def hurry(self) -> None:
        """Let every copy be due: nothing else moves."""
        for copy in self.pending:
            copy.due = self._now()

    def perform(self, copy: Copy) -> None:
        """Move the labels."""
        if copy.is_store:
            self.host.copy_from(self.gpu, copy.host, copy.gpu)
        else:
            self.gpu.copy_from(self.host, copy.gpu, copy.host)

    def _begin(self, copy: Copy) -> None:
        source, ids = (self.gpu, copy.gpu) if copy.is_store else (self.host, copy.host)
        copy.seen = source.label[ids].copy()
        self._check(self, copy)
        if not copy.is_store:
            self.gpu.clear(copy.gpu, LOADING)

    def _finish(self, copy: Copy) -> None:
        if copy.is_store or self.loads_wait_for_steps:
            self._catch_up()
        if copy.seen is None:
            self._begin(copy)
        self._count_uses(copy, -1)
        self._finished[copy.is_store].append(copy)
        if copy.failed:
            return
        source, ids = (self.gpu, copy.gpu) if copy.is_store else (self.host, copy.host)
        for i in np.flatnonzero(source.label[ids] != copy.seen)[:1]:
            raise Violation(
                "I2" if copy.is_store else "I3",
                f"worker {self.worker}: {copy.name} reads {self._place(copy.is_store)} block "
                f"{ids[i]}, which has changed under it and now holds "
                f"{source.describe(ids[i])}",
            )
        if not copy.is_store:
            changed = self._owner_changes[copy.gpu] != copy.owners
            for block in copy.gpu[changed][:1]:
                raise Violation(
                    "I3",
                    f"worker {self.worker}: {copy.name} writes GPU block {block}, which was "
                    "given to another request while the load was under way",
                )
        self.perform(copy)
        copy.done = True
        self._check(self, copy)
        ledger = self.stored if copy.is_store else self.loaded
        ledger.jobs += 1
        ledger.blocks += len(copy.gpu)
        ledger.bytes += copy.num_bytes

    def _due(self, is_store: bool) -> int:
        settings = self.settings
        if is_store and settings.lazy_stores:
            return self._now() + LAZY_STEPS
        low, high = settings.store_delay if is_store else settings.load_delay
        key = settings.seed * 7919 + self.worker * 104_729 + self._count * 15_485_863
        return self._now() + low + (key ^ key >> 7) % (high - low + 1)

    def _check_ids(self, gpu: np.ndarray, host: np.ndarray, what: str) -> None:
        for is_gpu, ids, first in ((True, gpu, 1), (False, host, 0)):
            memory, scale = (self.gpu, 1) if is_gpu else (self.host, self.blocks_per_chunk)
            for block in ids[(ids < first) | (ids >= len(memory))][:1]:
                raise Violation(
                    "I4",
                    f"worker {self.worker}: {what} uses {self._place(is_gpu)} block "
                    f"{block // scale}, which lies outside the pool: the worker has "
                    f"{len(memory) // scale}"
                    + (", and block 0 belongs to nobody" if is_gpu else ""),
                )
            if len(np.unique(ids)) != len(ids):
                raise Violation(
                    "I6",
                    f"worker {self.worker}: {what} names a {self._place(is_gpu)} block twice",
                )

    def _check_conflicts(self, copy: Copy) -> None:
        """No block may be written while another copy reads or writes it."""
        for is_gpu, blocks in self._uses(copy):
            writes = is_gpu != copy.is_store
            readers, writers = self._readers[is_gpu], self._writers[is_gpu]
            busy = writers[blocks] + readers[blocks] if writes else writers[blocks]
            for block in blocks[busy > 0][:1]:
                other = next(
                    c
                    for c in self.pending
                    for g, b in self._uses(c)
                    if g == is_gpu and block in b
                )
                raise Violation(
                    "I2" if not writes or other.is_store == is_gpu else "I3",
                    f"worker {self.worker}: {copy.name} "
                    f"{'writes' if writes else 'reads'} {self._place(is_gpu)} block {block} "
                    f"while {other.name} is still using it",
                )

    def _uses(self, copy: Copy) -> tuple[tuple[bool, np.ndarray], ...]:
        return (True, copy.gpu), (False, np.unique(copy.host // self.blocks_per_chunk))

    def _count_uses(self, copy: Copy, by: int) -> None:
        for is_gpu, blocks in self._uses(copy):
            counts = self._writers if is_gpu != copy.is_store else self._readers
            counts[is_gpu][blocks] += by

    @staticmethod
    def _place(is_gpu: bool) -> str:
        return "GPU" if is_gpu else "host"


def total(ledgers: Iterable[Ledger]) -> Ledger:
    result = Ledger()
    for ledger in ledgers:
        result.jobs += ledger.jobs
        result.blocks += ledger.blocks
        result.bytes += ledger.bytes
    return result
