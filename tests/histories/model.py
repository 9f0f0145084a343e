"""A model that computes labels: it checks every block it reads, and labels what it writes.

Like a real model runner it works on its own block tables, made from what the scheduler
sends, and reads a token's whole context: all of it in a full group, the window in a
sliding one.
"""

from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from .findings import Violation
from .memory import BlockMemory
from .streams import Stream, labels_of


@dataclass(frozen=True)
class Group:
    """A KV cache group, as the planner made it."""

    number: int
    block_size: int
    window: int | None

    def first_needed(self, position: int) -> int:
        """The first block that the token at `position` looks back to."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size


@dataclass
class _Row:
    """What the runner remembers of a request."""

    stream: Stream
    tables: list[np.ndarray]
    lengths: list[int]
    known_tokens: int

    def extend(self, block_ids: tuple[list[int], ...]) -> None:
        for group, blocks in enumerate(block_ids):
            end = self.lengths[group] + len(blocks)
            if end > len(self.tables[group]):
                self.tables[group] = np.concatenate(
                    (self.tables[group][: self.lengths[group]], np.zeros(2 * end, np.int64))
                )
            self.tables[group][self.lengths[group] : end] = blocks
            self.lengths[group] = end

    def clear(self) -> None:
        # New arrays: a step that the GPU has yet to run holds on to the old ones.
        self.tables = [np.zeros(0, np.int64) for _ in self.tables]
        self.lengths = [0] * len(self.tables)


@dataclass(frozen=True)
class _Work:
    """Tokens `start` to `stop` of one request, in the blocks of its tables."""

    name: str
    stream: Stream
    tables: tuple[np.ndarray, ...]
    start: int
    stop: int


class _Blocks:
    """Blocks of a batch, all in one array, and the label that each must have."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._marks: list[np.ndarray] = []
        # Of each piece: number of the work, group, first index, how many.
        self._pieces: list[tuple[int, int, int, int]] = []

    def add(
        self, work: int, group: int, index: int, ids: np.ndarray, marks: np.ndarray
    ) -> None:
        self._ids.append(ids)
        self._marks.append(marks)
        self._pieces.append((work, group, index, len(ids)))

    def close(self) -> None:
        if not self._pieces:
            self.works = self.groups = self.indices = self.ids = np.zeros(0, np.int64)
            self.labels = np.zeros(0, np.uint64)
            return
        pieces = np.array(self._pieces, dtype=np.int64).reshape(-1, 4)
        counts = pieces[:, 3]
        ends = counts.cumsum()
        self.works, self.groups, first = np.repeat(pieces[:, :3], counts, axis=0).T
        starts = np.repeat(ends - counts, counts)
        self.indices = first + np.arange(len(first)) - starts
        self.ids = np.concatenate(self._ids)
        self.labels = labels_of(np.concatenate(self._marks), self.groups)


@dataclass
class Batch:
    """One step, ready to run on the GPU of any worker."""

    works: list[_Work]
    # What is sampled, by request; None where the prompt is not complete.
    sampled: dict[str, int | None]
    # Blocks that were handed out for this step.
    handed_out: np.ndarray
    # A request's own last block, not full yet; what it writes; the full ones before.
    unfinished: _Blocks = field(default_factory=_Blocks)
    written: _Blocks = field(default_factory=_Blocks)
    full: _Blocks = field(default_factory=_Blocks)


class FakeModel:
    """The model runner of all workers: they see the same steps."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self._rows: dict[str, _Row] = {}
        self.gone: set[str] = set()

    def prepare(
        self, step: SchedulerOutput, streams: dict[str, Stream], handed_out: list[int]
    ) -> Batch:
        """Take over a step's requests and blocks."""
        for name in step.finished_req_ids:
            self._rows.pop(name, None)
        started = {}
        for new in step.scheduled_new_reqs:
            known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            row = _Row(
                streams[new.req_id],
                [np.zeros(0, np.int64) for _ in self.groups],
                [0] * len(self.groups),
                len(known),
            )
            row.extend(new.block_ids)
            self._rows[new.req_id] = row
            started[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            row = self._rows[name]
            if name in cached.resumed_req_ids:
                row.clear()
                row.known_tokens = row.stream.prompt_length + cached.num_output_tokens[i]
            if cached.new_block_ids[i] is not None:
                row.extend(cached.new_block_ids[i])
            started[name] = cached.num_computed_tokens[i]
        works = []
        sampled: dict[str, int | None] = {}
        for name, count in step.num_scheduled_tokens.items():
            row = self._rows[name]
            start, stop = started[name], started[name] + count
            if stop >= row.known_tokens:
                row.stream.grow_to(stop + 1)
                row.known_tokens = stop + 1
                sampled[name] = row.stream.tokens[stop]
            else:
                sampled[name] = None
            tables = tuple(
                table[:length] for table, length in zip(row.tables, row.lengths, strict=True)
            )
            works.append(_Work(name, row.stream, tables, start, stop))
        batch = Batch(works, sampled, np.array(handed_out, dtype=np.int64))
        for number, work in enumerate(works):
            for group, table in zip(self.groups, work.tables, strict=True):
                self._lay_out(batch, number, work, group, table)
        for blocks in (batch.unfinished, batch.written, batch.full):
            blocks.close()
        return batch

    @staticmethod
    def _lay_out(
        batch: Batch, number: int, work: _Work, group: Group, table: np.ndarray
    ) -> None:
        """Which blocks of a group a request reads and writes, and their labels."""
        size, start, stop = group.block_size, work.start, work.stop
        index, last = start // size, (stop - 1) // size
        if last >= len(table):
            _no_block(work, group)
        marks = work.stream.marks
        if start % size:
            batch.unfinished.add(
                number, group.number, index, table[index : index + 1], marks[start : start + 1]
            )
        ends = marks[stop : stop + 1]
        if index < last:
            full = marks[(index + 1) * size : last * size + 1 : size]
            ends = np.concatenate((full, ends))
        batch.written.add(number, group.number, index, table[index : last + 1], ends)
        first = group.first_needed(start)
        if first < index:
            full = marks[(first + 1) * size : index * size + 1 : size]
            batch.full.add(number, group.number, first, table[first:index], full)

    def run(self, batch: Batch, gpu: BlockMemory, worker: int) -> None:
        """Compute a step.

        A layer writes the KV of every token in the step before any token looks back: a
        request may hit full blocks that another one computes in the same step. Only what
        lies in a request's own last, unfinished block must be there before.
        """
        for i in self._wrong(batch, batch.unfinished, gpu):
            work = batch.works[batch.unfinished.works[i]]
            group = self.groups[batch.unfinished.groups[i]]
            index, size = work.start // group.block_size, group.block_size
            # It may be filled further, by this request's own tokens.
            ends = slice(work.start, min((index + 1) * size, len(work.stream)) + 1)
            found = gpu.label[batch.unfinished.ids[i]]
            if found not in work.stream.labels(group.number, ends):
                self._wrong_read(batch, batch.unfinished, i, gpu, worker)
        written = batch.written
        if not written.ids.all():
            i = int(np.argmin(written.ids != 0))
            _no_block(batch.works[written.works[i]], self.groups[written.groups[i]])
        gpu.write(written.ids, written.groups, written.indices, written.labels)
        for i in self._wrong(batch, batch.full, gpu):
            self._wrong_read(batch, batch.full, i, gpu, worker)

    def _wrong(self, batch: Batch, blocks: _Blocks, gpu: BlockMemory) -> list[int]:
        """Where the blocks hold something else, except of requests that are gone."""
        wrong = (gpu.label[blocks.ids] != blocks.labels).nonzero()[0].tolist()
        return [i for i in wrong if batch.works[blocks.works[i]].name not in self.gone]

    def _wrong_read(
        self, batch: Batch, blocks: _Blocks, i: int, gpu: BlockMemory, worker: int
    ) -> None:
        work, block = batch.works[blocks.works[i]], int(blocks.ids[i])
        if block == 0:
            found = "no block: the table holds the null block there"
        else:
            found = f"GPU block {block} with {gpu.describe(block)}"
            if gpu.label[block]:
                found += f", not of {work.name}"
        raise Violation(
            "I1",
            f"worker {worker}: {work.name} computes tokens {work.start} to {work.stop} on "
            f"its block {blocks.indices[i]} of group {blocks.groups[i]}; it finds {found}",
        )


def _no_block(work: _Work, group: Group) -> None:
    raise Violation(
        "I1",
        f"{work.name} computes tokens {work.start} to {work.stop} without a block for them in "
        f"group {group.number}",
    )
