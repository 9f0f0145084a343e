"""A model that computes labels: it checks every block it reads, and labels what it writes.

Like a real model runner it works on its own block tables, made from what the scheduler
sends, and reads a token's whole context: all of it in a full group, the window in a
sliding one.
"""

from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput

from .findings import Violation
from .memory import BlockMemory
from .streams import Stream


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


@dataclass
class Batch:
    """One step, ready to run on the GPU of any worker."""

    works: list[_Work]
    # What is sampled, by request; None where the prompt is not complete.
    sampled: dict[str, int | None]
    # Blocks that were handed out for this step.
    handed_out: np.ndarray


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
        return Batch(works, sampled, np.array(handed_out, dtype=np.int64))

    def run(self, batch: Batch, gpu: BlockMemory, worker: int) -> None:
        """Compute a step.

        A layer writes the KV of every token in the step before any token looks back: a
        request may hit full blocks that another one computes in the same step. Only what
        lies in a request's own last, unfinished block must be there before.
        """
        for check, write in ((self._check_unfinished, self._write), (self._check_full, None)):
            for work in batch.works:
                for group, table in zip(self.groups, work.tables, strict=True):
                    if work.name not in self.gone:
                        check(work, group, table, gpu, worker)
                    if write:
                        write(work, group, table, gpu, worker)

    def _check_unfinished(
        self, work: _Work, group: Group, table: np.ndarray, gpu: BlockMemory, worker: int
    ) -> None:
        size, start = group.block_size, work.start
        index = start // size
        if start % size == 0:
            return
        found = gpu.label[table[index]]
        if found == work.stream.labels(group.number, start):
            return
        # It may be filled further, by this request's own tokens.
        ends = slice(start, min((index + 1) * size, len(work.stream)) + 1)
        if found not in work.stream.labels(group.number, ends):
            self._wrong_read(work, group, index, table, gpu, worker)

    def _check_full(
        self, work: _Work, group: Group, table: np.ndarray, gpu: BlockMemory, worker: int
    ) -> None:
        first, full = group.first_needed(work.start), work.start // group.block_size
        if full <= first:
            return
        wanted = work.stream.block_labels(group.number, group.block_size, first, full)
        right = gpu.label[table[first:full]] == wanted
        if not right.all():
            wrong = np.flatnonzero(~right)
            self._wrong_read(work, group, first + int(wrong[0]), table, gpu, worker)

    def _wrong_read(
        self,
        work: _Work,
        group: Group,
        index: int,
        table: np.ndarray,
        gpu: BlockMemory,
        worker: int,
    ) -> None:
        block = int(table[index])
        if block == 0:
            found = "no block: the table holds the null block there"
        else:
            found = f"GPU block {block} with {gpu.describe(block)}"
            if gpu.label[block]:
                found += f", not of {work.name}"
        raise Violation(
            "I1",
            f"worker {worker}: {work.name} computes tokens {work.start} to {work.stop} on "
            f"its block {index} of group {group.number}; it finds {found}",
        )

    def _write(
        self, work: _Work, group: Group, table: np.ndarray, gpu: BlockMemory, worker: int
    ) -> None:
        size = group.block_size
        first, last = work.start // size, (work.stop - 1) // size
        if last >= len(table) or not table[first : last + 1].all():
            raise Violation(
                "I1",
                f"worker {worker}: {work.name} computes tokens {work.start} to {work.stop} "
                f"without a block for them in group {group.number}",
            )
        if first < last:
            full = work.stream.block_labels(group.number, size, first, last)
            gpu.write(table[first:last], group.number, np.arange(first, last), full)
        gpu.write(table[last], group.number, last, work.stream.labels(group.number, work.stop))
