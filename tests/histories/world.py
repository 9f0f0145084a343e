"""Replays a history on the engine and watches every step."""

import collections
import dataclasses
import hashlib
import traceback
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from . import checks, pins
from .engine import Engine
from .findings import Violation
from .history import Abort, Arrive, History, Reset, Steps
from .memory import NEW_OWNER, BlockMemory, CopyEngine, total
from .model import Batch, FakeModel
from .stable import Name
from .streams import Stream, text

# Steps in which nothing happens until every copy is made due, and then until the engine
# counts as stuck.
_PATIENCE = 12
_STUCK = 40
_MOST_STEPS = 20_000
_MOST_STEPS_TO_REST = 60
# Tokens that a request may generate beyond those after which it stops.
_MORE_THAN_ENOUGH = 8
# The token that stands for every part of every image.
_PLACEHOLDER = 1


@dataclass
class Report:
    """What happened in a history that broke no invariant."""

    steps: int = 0
    requests: int = 0
    preemptions: int = 0
    stores: int = 0
    stored_blocks: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    trace: str = ""

    def add(self, other: "Report") -> None:
        for field in dataclasses.fields(self):
            if field.name != "trace":
                value = getattr(self, field.name) + getattr(other, field.name)
                setattr(self, field.name, value)


class World:
    """One engine and everything that happens to it.

    Args:
        history: to replay.
        copies: class of the copy engine; tests put faulty ones here.
    """

    def __init__(self, history: History, copies: type[CopyEngine] = CopyEngine) -> None:
        self.history = history
        self.pin: ModuleType = pins.current()
        self.settings = settings = history.settings
        self.engine = engine = Engine(settings, self.pin)
        self.scheduler = engine.scheduler
        self.model = FakeModel(engine.groups)
        self.now = 0
        self.streams: dict[str, Stream] = {}
        self.requests: dict[str, Request] = {}
        # Tokens in each answer.
        self.answers: dict[str, int] = {}
        self.gpus = [BlockMemory(engine.num_blocks) for _ in engine.workers]
        # How often each GPU block was handed out.
        self.owner_changes = np.zeros(engine.num_blocks, dtype=np.int64)
        self._handed_out: list[int] = []
        # Tokens that each request's load brings.
        self.external_tokens: dict[str, int] = {}
        self._watch_allocations()
        self.copies = [
            copies(
                settings,
                worker.rank,
                gpu,
                lambda: self.now,
                self.owner_changes,
                lambda rank=worker.rank: self._lagging[rank] is not None,
                lambda rank=worker.rank: self._catch_up(rank),
                lambda mine, copy: checks.copy(self, mine, copy),
            )
            for worker, gpu in zip(engine.workers, self.gpus, strict=True)
        ]
        for worker, mine in zip(engine.workers, self.copies, strict=True):
            worker.connector.connector_worker.spec.copies = mine
        engine.register_caches()
        self.at_rest = checks.state_sizes(self)
        self.jobs: dict[int, str] = {}
        self.reported = {"store": 0, "load": 0}
        # By KV cache group, where the release counts them.
        self.reported_chunks: list[int] | None = None
        self.external = {"queries": 0, "hits": 0}
        # By worker, the blocks that a load writes or has written since they were handed out.
        self.loaded = [np.zeros(engine.num_blocks, dtype=bool) for _ in engine.workers]
        self._lagging: list[Batch | None] = [None] * len(engine.workers)
        # Steps whose output the scheduler has not seen yet.
        self._in_flight: collections.deque[tuple[SchedulerOutput, Batch, ModelRunnerOutput]] = (
            collections.deque()
        )
        # The step that the workers are running: where requests start.
        self.starts: dict[str, int] = {}
        self._aborts: list[str] = []
        self._idle = 0
        self._digest = hashlib.sha256()
        self.report = Report()

    # --- replay ---

    def run(self) -> Report:
        """Replay the history to its end.

        Raises:
            Violation: an invariant does not hold, or vLLM raised an error.
        """
        try:
            for operation in self.history.operations:
                self._apply(operation)
            self._run_out()
            checks.at_end(self)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise Violation(
                "crash",
                f"step {self.now}: {type(error).__name__} in {place.name} "
                f"({place.filename.rpartition('/vllm/')[2]}:{place.lineno}): "
                f"{error or place.line}",
            ) from error
        finally:
            self.scheduler.shutdown()
        return self._finished_report()

    def _apply(self, operation: Arrive | Abort | Reset | Steps) -> None:
        match operation:
            case Arrive():
                self._arrive(operation)
            case Abort(name, during_step):
                if during_step:
                    self._aborts.append(name)
                else:
                    self._abort(name)
            case Reset(running, connector):
                self._reset(running, connector)
            case Steps(count):
                for _ in range(count):
                    self.step()

    def _arrive(self, arrival: Arrive) -> None:
        parts = [text(name, length) for name, length in arrival.prompt]
        before = self.requests.get(arrival.after)
        salt, adapter = arrival.salt, arrival.adapter
        images: list[MultiModalFeatureSpec] = []
        start = 0
        if before is not None:
            said = self.streams[before.request_id].tokens[: before.num_tokens]
            parts.insert(0, np.array(said))
            start = len(parts[0])
            salt = before.cache_salt
            adapter = before.lora_request and before.lora_request.lora_name
            images += before.mm_features
        # Like a server, refuse nothing and cut what is too long.
        most = arrival.generate + (_MORE_THAN_ENOUGH if arrival.stops else 0)
        room = self.settings.max_model_len - most
        prompt = np.concatenate(parts)[:room] if parts else text("empty", 1)
        images += [_image(name, start + at, length) for name, at, length in arrival.images]
        images = [image for image in images if _end(image) <= len(prompt)]
        for image in images:
            prompt[image.mm_position.offset : _end(image)] = _PLACEHOLDER
        name = Name(arrival.name)
        self.streams[name] = stream = Stream(
            prompt,
            {image.mm_position.offset: image.identifier for image in images},
            f"{salt} {adapter}",
        )
        answer, stop = arrival.generate, []
        if arrival.stops:
            said = stream.answer(answer)
            stop = said[-1:]
            answer = said.index(stop[0]) + 1
        self.requests[name] = request = Request(
            request_id=name,
            prompt_token_ids=list(stream.tokens),
            sampling_params=SamplingParams(
                max_tokens=most,
                stop_token_ids=stop,
                ignore_eos=True,
                temperature=0,
            ),
            pooling_params=None,
            mm_features=images,
            lora_request=LoRARequest(adapter, 1, "nowhere") if adapter else None,
            cache_salt=salt,
            block_hasher=self.engine.block_hasher,
            arrival_time=float(len(self.requests)),
        )
        self.answers[name] = answer
        self.scheduler.add_request(request)
        self.report.requests += 1

    def _abort(self, name: str) -> None:
        request = self.requests.get(Name(name))
        if request is not None and not request.is_finished():
            self.model.gone.add(request.request_id)
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _reset(self, running: bool, connector: bool) -> None:
        if running and self.settings.async_scheduling and not self.pin.RESETS_RUNNING_ASYNC:
            return
        try:
            self.scheduler.reset_prefix_cache(running, connector)
        except RuntimeError as error:
            # vLLM refuses while blocks are held for a copy, or for a step in flight.
            if "Failed to reset KV cache" not in str(error):
                raise

    # --- steps ---

    def step(self) -> None:
        """One turn of the engine core's loop."""
        self.now += 1
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._in_flight.append((step, *self._execute(step)))
            if len(self._in_flight) < self.settings.batches and self.scheduler.has_requests():
                return
        if self._in_flight:
            self._update(*self._in_flight.popleft())

    def _execute(self, step: SchedulerOutput) -> tuple[Batch, ModelRunnerOutput]:
        handed_out, self._handed_out = self._handed_out, []
        self.jobs.update(self.pin.jobs_of(step, self.scheduler.connector))
        batch = self.model.prepare(step, self.streams, handed_out)
        for loaded in self.loaded:
            loaded[batch.handed_out] = False
        self._note(step)
        self.starts = {work.name: work.start for work in batch.works}
        checks.step_begins(self, batch)
        names = list(batch.sampled)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[
                [] if token is None else [token] for token in batch.sampled.values()
            ],
        )
        result = self.engine.execute(step, output, lambda rank: self._compute(rank, batch))
        self._look_for_progress(step, result)
        return batch, result

    def _compute(self, rank: int, batch: Batch) -> None:
        if not batch.works:
            # Nothing to run; what was handed out is for loads.
            return
        self._catch_up(rank)
        self._lagging[rank] = batch
        if not self.settings.gpu_lag:
            self._catch_up(rank)

    def _catch_up(self, rank: int) -> None:
        batch, self._lagging[rank] = self._lagging[rank], None
        if batch is not None:
            # What a load writes was cleared when the load began.
            fresh = batch.handed_out
            self.gpus[rank].clear(fresh[~self.loaded[rank][fresh]], NEW_OWNER)
            self.model.run(batch, self.gpus[rank], rank)
            self.copies[rank].begin_copies()

    def _update(self, step: SchedulerOutput, batch: Batch, output: ModelRunnerOutput) -> None:
        for rank, lagging in enumerate(self._lagging):
            if lagging is batch:
                self._catch_up(rank)
        for name in self._aborts:
            self._abort(name)
        self._aborts.clear()
        results = self.scheduler.update_from_output(step, output)
        for result in results.values():
            if result.scheduler_stats is not None:
                checks.statistics(self, result.scheduler_stats)
        checks.between_steps(self)

    def _run_out(self) -> None:
        """Let every request end, then every copy; later requests keep the engine going."""
        last = self.now + _MOST_STEPS
        while waiting := [r for r in self.requests.values() if not r.is_finished()]:
            self.step()
            if self.now > last or not (self.scheduler.has_requests() or self._in_flight):
                raise Violation("I8", f"{waiting[0].request_id} has not ended")
        last = self.now + _MOST_STEPS_TO_REST
        while not checks.is_at_rest(self) and self.now < last:
            for copies in self.copies:
                copies.hurry()
            if not self.scheduler.has_requests() and not self._in_flight:
                self._arrive(Arrive(f"nudge-{self.now}", (("nudge", 1),), 1))
            self.step()

    # --- watching ---

    def _watch_allocations(self) -> None:
        """See which blocks are handed out, and how much each load is to bring."""
        pool, connector = self.scheduler.kv_cache_manager.block_pool, self.scheduler.connector
        get_new_blocks = pool.get_new_blocks
        update_state_after_alloc = connector.update_state_after_alloc

        def watched_get(count: int) -> list:
            blocks = get_new_blocks(count)
            ids = [block.block_id for block in blocks]
            self.owner_changes[ids] += 1
            self._handed_out += ids
            return blocks

        def watched_update(request: Request, blocks: object, external: int) -> None:
            self.external_tokens[request.request_id] = external
            update_state_after_alloc(request, blocks, external)

        pool.get_new_blocks = watched_get
        connector.update_state_after_alloc = watched_update

    def _look_for_progress(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        connector = output.kv_connector_output
        moved = connector is not None and (
            connector.finished_recving or connector.finished_sending
        )
        if step.total_num_scheduled_tokens or moved:
            self._idle = 0
            return
        self._idle += 1
        if self._idle == _PATIENCE:
            for copies in self.copies:
                copies.hurry()
        waiting = [r for r in self.requests.values() if not r.is_finished()]
        if self._idle > _STUCK and waiting:
            manager = self.scheduler.kv_cache_manager
            held = sum(
                len(table) for r in waiting for table in manager.get_block_ids(r.request_id)
            )
            raise Violation(
                "I8",
                f"step {self.now}: nothing has moved for {self._idle} steps and "
                f"{waiting[0].request_id} ({waiting[0].status.name}) waits for ever; of "
                f"{self.engine.num_blocks - 1} GPU blocks "
                f"{manager.block_pool.get_num_free_blocks()} are free, and requests that wait "
                f"hold {held}",
            )

    def _note(self, step: SchedulerOutput) -> None:
        """Make the step part of the trace that tells whether two replays are equal."""
        self._digest.update(
            repr(
                (
                    self.now,
                    list(step.num_scheduled_tokens.items()),
                    [(new.req_id, new.block_ids) for new in step.scheduled_new_reqs],
                    step.scheduled_cached_reqs.new_block_ids,
                    sorted(self.jobs.items())[-4:],
                )
            ).encode()
        )

    def _finished_report(self) -> Report:
        report = self.report
        stored = total(copies.stored for copies in self.copies)
        loaded = total(copies.loaded for copies in self.copies)
        report.steps = self.now
        report.preemptions = sum(r.num_preemptions for r in self.requests.values())
        report.stores, report.stored_blocks = stored.jobs, stored.blocks
        report.loads, report.loaded_blocks = loaded.jobs, loaded.blocks
        report.loaded_tokens = self.external["hits"]
        report.trace = self._digest.hexdigest()
        return report


def _image(name: str, start: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=start, length=length),
    )


def _end(image: MultiModalFeatureSpec) -> int:
    return image.mm_position.offset + image.mm_position.length


def replay(history: History, copies: type[CopyEngine] = CopyEngine) -> Report:
    """Replay a history.

    Raises:
        Violation: an invariant does not hold, or vLLM raised an error.
    """
    return World(history, copies).run()
