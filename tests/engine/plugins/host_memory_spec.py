"""An offloading backend in ordinary host memory, as unkind as a real one may be.

vLLM's own copies blocks with CUDA. This one takes its place through the connector's
extension point and leaves everything else (scheduling, the manager, its sizes) to vLLM:

    "kv_connector_extra_config": {
        "spec_name": "HostMemorySpec", "spec_module_path": "host_memory_spec",
        "cpu_bytes_to_use": ..., "hostility": {"seed": 1, "delay": [0, 6], "ledger": folder}
    }

Copies are done late, in the moment in which they are reported or waited for, and by each
worker in its own time. What is handed out and not written yet is poison, on the GPU and in
host memory, and so is what a copy under way will write. Copies, external hits and problems
(a wrong id, a copy of poison, a block in two hands) go to the ledger, which any process can
read. Without a ledger a problem is an error.

A chunk is what the manager hands out: a page for each of `blocks_per_chunk` consecutive
blocks of one KV cache group, in each tensor of that group.
"""

import json
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

try:
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

    ONE_WORKER = True  # v0.33.0: a spec makes one worker for both directions
except ImportError:
    from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

    ONE_WORKER = False  # v0.19.1: a handler for each

# Large but finite as a float of any width: what masks it away gets rid of it, what
# computes with it does not get away with it.
POISON_BYTE = 0x46
POISON_WORD = 0x46464646


@dataclass(frozen=True)
class Hostility:
    """How the copies behave; `hostility` in the extra config.

    Attributes:
        seed: of the delays.
        delay: polls for which a copy is put off, at least and at most.
        fail_every: of so many copies one fails; 0 for none.
        ledger: folder of the ledger.
    """

    seed: int = 0
    delay: tuple[int, int] = (0, 0)
    fail_every: int = 0
    ledger: str | None = None


class Ledger:
    """Entries of one process, a line of JSON each; `read` has those of all processes."""

    def __init__(self, folder: str | None, name: str):
        self._file = folder and Path(folder, f"{name}.jsonl")

    def write(self, kind: str, **entry) -> None:
        if self._file:
            with open(self._file, "a") as file:
                file.write(json.dumps({"kind": kind, **entry}) + "\n")

    def problem(self, text: str) -> None:
        if not self._file:
            raise ValueError(text)
        self.write("problem", text=text)

    @staticmethod
    def read(folder: Path | str) -> list[dict]:
        files = sorted(Path(folder).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


class Page(NamedTuple):
    """A GPU block of a group, and its place in host memory."""

    group: int
    block: int
    chunk: int
    place: int


@dataclass
class Copy:
    job: int
    is_store: bool
    pages: list[Page]
    due: int
    fails: bool
    waited_for: bool = False

    def __str__(self) -> str:
        return f"{'store' if self.is_store else 'load'} {self.job}"

    @property
    def blocks(self) -> set[int]:
        return {page.block for page in self.pages}

    @property
    def chunks(self) -> set[int]:
        return {page.chunk for page in self.pages}


@dataclass
class Direction:
    """The copies one way, done in the order in which they were submitted."""

    polls: int = 0
    pending: deque[Copy] = field(default_factory=deque)
    finished: list[TransferResult] = field(default_factory=list)


class HostMemory:
    """The host's copy of a worker's KV cache tensors, and the copying."""

    def __init__(self, kv_caches, blocks_per_chunk, num_chunks, rank=0, hostility=None):
        self.hostility = hostility or Hostility()
        self.ledger = Ledger(self.hostility.ledger, f"worker-{rank}")
        self.blocks_per_chunk = blocks_per_chunk
        # the bytes that count of each tensor's pages, for every group
        self.tensors = [
            {ref.tensor_idx: ref.page_size_bytes for ref in refs}
            for refs in kv_caches.group_data_refs
        ]
        self.gpu = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        self.host = [
            torch.full(
                (num_chunks, blocks_per_chunk, tensor.shape[1]), POISON_BYTE, dtype=torch.int8
            )
            for tensor in self.gpu
        ]
        self._random = random.Random(f"{self.hostility.seed} {rank}")
        self._copies = 0
        self._ways = {True: Direction(), False: Direction()}

    # --- what a worker does ---

    def store(self, job: int, blocks, chunks) -> None:
        """Begin to copy blocks of the KV cache into chunks."""
        copy = self._begin(job, True, blocks, chunks)
        for chunk in copy.chunks:
            for host in self.host:
                host[chunk] = POISON_BYTE

    def load(self, job: int, chunks, blocks, at_once: bool = False) -> None:
        """Begin to copy chunks into blocks of the KV cache."""
        copy = self._begin(job, False, blocks, chunks)
        self._poison(copy.blocks)
        if at_once:
            copy.waited_for = True
            self._ways[False].pending.remove(copy)
            self._finish(copy)

    def poll(self, is_store: bool) -> list[TransferResult]:
        """The copies that were finished since the last call."""
        way = self._ways[is_store]
        way.polls += 1
        while way.pending and way.pending[0].due <= way.polls:
            self._finish(way.pending.popleft())
        finished, way.finished = way.finished, []
        return finished

    def wait(self, is_store: bool, jobs: Collection[int]) -> None:
        """Finish these copies, and with them the earlier ones."""
        pending = self._ways[is_store].pending
        while any(copy.job in jobs for copy in pending):
            copy = pending.popleft()
            copy.waited_for = True
            self._finish(copy)

    def hand_out(self, blocks: Iterable[int]) -> None:
        """The scheduler gives these blocks of the KV cache to new owners."""
        blocks = set(blocks)
        for copy in self._pending():
            for block in sorted(blocks & copy.blocks)[:1]:
                what = "reads" if copy.is_store else "writes"
                self.ledger.problem(f"{copy} still {what} block {block}: it has a new owner")
        self._poison(blocks)

    # --- how ---

    def perform(self, copy: Copy) -> int:
        """Move the bytes; the number of them."""
        moved = 0
        for tensor in range(len(self.gpu)):
            pages = [page for page in copy.pages if tensor in self.tensors[page.group]]
            for group in sorted({page.group for page in pages}):
                size = self.tensors[group][tensor]
                mine = [page for page in pages if page.group == group]
                blocks = torch.tensor([page.block for page in mine])
                chunks = torch.tensor([page.chunk for page in mine])
                places = torch.tensor([page.place for page in mine])
                if copy.is_store:
                    source = self.gpu[tensor][blocks, :size]
                    self.host[tensor][chunks, places, :size] = source
                else:
                    source = self.host[tensor][chunks, places, :size]
                    self.gpu[tensor][blocks, :size] = source
                moved += len(mine) * size
                self._check_for_poison(copy, mine, source)
        return moved

    def _begin(self, job: int, is_store: bool, blocks, chunks) -> Copy:
        self._copies += 1
        every = self.hostility.fail_every
        way = self._ways[is_store]
        copy = Copy(
            job,
            is_store,
            list(self._pages(f"{'store' if is_store else 'load'} {job}", blocks, chunks)),
            due=way.polls + 1 + self._random.randint(*self.hostility.delay),
            fails=bool(every) and self._copies % every == 0,
        )
        for other in self._pending():
            if not (is_store or other.is_store):
                continue  # both only read host memory
            for chunk in sorted(copy.chunks & other.chunks)[:1]:
                self.ledger.problem(f"{copy} and {other} use chunk {chunk} at once")
        way.pending.append(copy)
        return copy

    def _finish(self, copy: Copy) -> None:
        moved = 0 if copy.fails else self.perform(copy)
        self._report(copy, moved)

    def _report(self, copy: Copy, moved: int) -> None:
        result = TransferResult(copy.job, not copy.fails, moved)
        self._ways[copy.is_store].finished.append(result)
        groups = [page.group for page in copy.pages]
        self.ledger.write(
            str(copy).split()[0],
            job=copy.job,
            bytes=moved,
            blocks=[groups.count(group) for group in range(len(self.tensors))],
            waited_for=copy.waited_for,
            failed=copy.fails,
        )

    def _pending(self) -> Iterator[Copy]:
        for way in self._ways.values():
            yield from way.pending

    def _poison(self, blocks: Iterable[int]) -> None:
        rows = torch.tensor(sorted(blocks), dtype=torch.int64)
        for tensor in self.gpu:
            tensor[rows] = POISON_BYTE

    def _check_for_poison(self, copy: Copy, pages: list[Page], source: torch.Tensor) -> None:
        poisoned = (source.contiguous().view(torch.int32) == POISON_WORD).any(dim=1)
        for page, poison in zip(pages, poisoned.tolist()):
            if poison:
                place = f"block {page.block}" if copy.is_store else f"chunk {page.chunk}"
                text = f"{copy} copies {place} of group {page.group}, not wholly written"
                self.ledger.problem(text)
                return

    def _pages(self, what: str, blocks, chunks) -> Iterator[Page]:
        """Each block of a transfer, with its place; those with impossible ids are left out."""
        sizes = getattr(blocks, "group_sizes", None) or [len(blocks.block_ids)]
        firsts = getattr(blocks, "block_indices", None)
        if len(sizes) != len(self.tensors):
            groups = f"{len(sizes)} KV cache groups, where there are {len(self.tensors)}"
            return self.ledger.problem(f"{what} is of {groups}")
        block_ids, chunk_ids = iter(blocks.block_ids.tolist()), iter(chunks.block_ids.tolist())
        for group, size in enumerate(sizes):
            # without an index, the last block ends a chunk
            first = -size if firsts is None else firsts[group]
            place, chunk = first % self.blocks_per_chunk, None
            for _ in range(size):
                if chunk is None or place == self.blocks_per_chunk:
                    place = 0 if chunk is not None else place
                    chunk = next(chunk_ids, None)
                    if chunk is None:
                        return self.ledger.problem(f"{what} names too few chunks")
                block = next(block_ids)
                # block 0 is vLLM's null block
                if self._is_one_of(what, "block", block, 1, len(self.gpu[0])) and (
                    self._is_one_of(what, "chunk", chunk, 0, len(self.host[0]))
                ):
                    yield Page(group, block, chunk, place)
                place += 1
        if next(chunk_ids, None) is not None:
            self.ledger.problem(f"{what} names too many chunks")

    def _is_one_of(self, what: str, kind: str, number: int, first: int, end: int) -> bool:
        if first <= number < end:
            return True
        self.ledger.problem(f"{what}: {kind} {number} is not one of {first} to {end - 1}")
        return False


# --- what the scheduler tells ---


class SchedulerNews:
    """The blocks that the scheduler's process hands out, sent with each step's metadata."""

    ledger = Ledger(None, "")
    handed_out: ClassVar[list[int]] = []


def _wrap(owner: type, name: str):
    def replace(wrapper):
        original = getattr(owner, name)
        setattr(owner, name, wraps(original)(lambda *args: wrapper(original, *args)))

    return replace


@_wrap(BlockPool, "get_new_blocks")
def _(original, pool, num_blocks):
    blocks = original(pool, num_blocks)
    SchedulerNews.handed_out += [block.block_id for block in blocks]
    return blocks


@_wrap(OffloadingConnector, "update_state_after_alloc")
def _(original, connector, request, blocks, num_external_tokens):
    if num_external_tokens:
        SchedulerNews.ledger.write("hit", tokens=num_external_tokens)
    return original(connector, request, blocks, num_external_tokens)


@_wrap(OffloadingConnector, "build_connector_meta")
def _(original, connector, scheduler_output):
    metadata = original(connector, scheduler_output)
    metadata.handed_out, SchedulerNews.handed_out = SchedulerNews.handed_out, []
    return metadata


@_wrap(OffloadingConnector, "handle_preemptions")
def _(original, connector, metadata):
    """What is to be saved from the blocks' new owners is saved now."""
    original(connector, metadata)
    spec = connector.connector_worker.spec
    if isinstance(spec, _Spec):  # an engine of another test in this process may have another
        spec.memory.hand_out(metadata.handed_out)


# --- the interface of the pin ---


class _Spec(CPUOffloadingSpec):
    memory_class: ClassVar[type[HostMemory]] = HostMemory

    def __init__(self, *args):
        super().__init__(*args)
        self.memory: HostMemory | None = None
        self.hostility = Hostility(**self.extra_config.get("hostility", {}))
        SchedulerNews.ledger = Ledger(self.hostility.ledger, "scheduler")
        SchedulerNews.handed_out = []

    def _make_memory(self, *args) -> HostMemory:
        if self.memory is None:
            self.memory = self.memory_class(*args, self.hostility)
        return self.memory


if ONE_WORKER:

    class HostMemorySpec(_Spec):
        def get_worker(self, kv_caches):
            sizes = self.blocks_per_chunk, self.num_chunks
            return HostMemoryWorker(
                self._make_memory(kv_caches, *sizes, self.config.parallel.rank)
            )

    class HostMemoryWorker(OffloadingWorker):
        def __init__(self, memory: HostMemory):
            self.memory = memory

        def submit_store(self, job_id, src_spec, dst_spec) -> bool:
            self.memory.store(job_id, src_spec, dst_spec)
            return True

        def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
            self.memory.load(job_id, src_spec, dst_spec, at_once=expedited)
            return True

        def get_finished(self) -> list[TransferResult]:
            return self.memory.poll(True) + self.memory.poll(False)

        def wait(self, job_ids) -> None:
            for is_store in (True, False):
                self.memory.wait(is_store, job_ids)

else:

    class HostMemorySpec(_Spec):
        supports_hma = True

        def get_handlers(self, kv_caches):
            sizes = self.block_size_factor, self.num_blocks
            rank = self.vllm_config.parallel_config.rank
            memory = self._make_memory(kv_caches, *sizes, rank)
            yield GPULoadStoreSpec, CPULoadStoreSpec, HostMemoryHandler(memory, True)
            yield CPULoadStoreSpec, GPULoadStoreSpec, HostMemoryHandler(memory, False)

    class HostMemoryHandler(OffloadingHandler):
        def __init__(self, memory: HostMemory, is_store: bool):
            self.memory = memory
            self.is_store = is_store
            self.submit = memory.store if is_store else memory.load

        def transfer_async(self, job_id, spec) -> bool:
            self.submit(job_id, *spec)
            return True

        def get_finished(self) -> list[TransferResult]:
            return self.memory.poll(self.is_store)

        def wait(self, job_ids) -> None:
            self.memory.wait(self.is_store, job_ids)
