"""The real scheduler and connector of the pin, with a model and copies that take no time."""

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.minimum import runs
from tests.histories import engine as bed
from tests.histories import pins
from tests.histories.geometry import GEOMETRIES
from tests.histories.history import Settings

PIN = pins.current()


@dataclass(frozen=True)
class Setup:
    """An engine.

    Attributes:
        geometry: name in `tests.histories.geometry`.
        gpu_blocks: blocks of the GPU pool; None for more than the longest request needs.
        gpu_bytes: size of the GPU pool, in the place of `gpu_blocks`.
        host_bytes: size of the host tier.
        host_blocks: the same in blocks of the GPU pool, on top.
        kv_dtype: `bf16` or `fp8`.
        blocks_per_chunk: GPU blocks in a chunk of the host tier.
        max_model_len: longest request, in tokens.
        budget: tokens computed in one step.
        max_requests: requests in one step.
        connector: name of vLLM's KV connector.
        connector_options: what its configuration says beyond the beds'.
        hash_block: makes the hash of a block.
    """

    geometry: str
    host_bytes: int = 0
    host_blocks: int = 0
    gpu_blocks: int | None = None
    gpu_bytes: int | None = None
    kv_dtype: str = "bf16"
    blocks_per_chunk: int = 1
    max_model_len: int = 131072
    budget: int = 8192
    max_requests: int = 256
    connector: str = "OffloadingConnector"
    connector_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    hash_block: Callable[[tuple], bytes] = sha256


@dataclass(frozen=True)
class Copy:
    """One job, as a worker gets it."""

    job: int
    is_store: bool
    gpu: list[int]
    host: list[int]
    num_bytes: int
    failed: bool = False


@dataclass
class Total:
    """Jobs, the blocks and bytes that they moved, and the copies that neighbours make."""

    jobs: int = 0
    blocks: int = 0
    runs: int = 0
    bytes: int = 0

    def add(self, copy: Copy) -> None:
        self.jobs += 1
        self.blocks += len(copy.gpu)
        self.runs += runs(zip(copy.gpu, copy.host, strict=True))
        self.bytes += copy.num_bytes


class Copies:
    """Copies that are done at once; the interface of `tests.histories.memory.CopyEngine`."""

    loads_wait_for_steps = False

    def __init__(self) -> None:
        self.blocks_per_chunk = 1
        self.log: list[Copy] | None = None
        self.stored, self.loaded = Total(), Total()
        self._finished: dict[bool, list[Copy]] = {True: [], False: []}

    def allocate(self, chunks: int, blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk

    def submit(
        self, job: int, is_store: bool, gpu: list[int], host: list[int], num_bytes: int
    ) -> None:
        done = Copy(job, is_store, gpu, host, num_bytes)
        self.count(done)
        self._finished[is_store].append(done)

    def count(self, copy: Copy) -> None:
        if self.log is not None:
            self.log.append(copy)
        (self.stored if copy.is_store else self.loaded).add(copy)

    def totals(self) -> dict[str, dict[str, int]]:
        return {"stored": vars(self.stored), "loaded": vars(self.loaded)}

    def poll(self, is_store: bool) -> list[Copy]:
        finished, self._finished[is_store] = self._finished[is_store], []
        return finished

    def wait(self, is_store: bool, jobs: Collection[int]) -> None:
        pass


class SimpleWorker:
    """The worker side of SimpleCPUOffloadConnector, with copies that are done at once."""

    def __init__(self, copies: Copies, bytes_per_block: int) -> None:
        self.copies = copies
        self.bytes_per_block = bytes_per_block
        self.metadata: Any = None
        self._stored: dict[int, int] = {}

    def register_kv_caches(self, caches: Any) -> None:
        pass

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.metadata = metadata

    def clear_connector_metadata(self) -> None:
        self.metadata = None

    def handle_preemptions(self, metadata: Any) -> None:
        pass

    def get_finished(self, finished: set[str]) -> tuple[None, set[str] | None]:
        made, loaded = self.metadata, set()
        for event, is_store, gpu, host in (
            (made.load_event, False, made.load_gpu_blocks, made.load_cpu_blocks),
            (made.store_event, True, made.store_gpu_blocks, made.store_cpu_blocks),
        ):
            if event < 0:
                continue
            size = len(gpu) * self.bytes_per_block
            self.copies.count(Copy(event, is_store, gpu, host, size))
            if is_store:
                self._stored[event] = 1
            else:
                loaded.update(made.load_event_to_reqs.get(event, ()))
        return None, loaded or None

    def build_connector_worker_meta(self) -> Any:
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        stored, self._stored = self._stored, {}
        return SimpleCPUOffloadWorkerMetadata(stored) if stored else None


# Steps in which a lone request must end.
_PATIENCE = 1000


def whole_answer(request: Request) -> list[int]:
    """All but the last token at once, which the next step computes, then the last.

    The blocks are those that one token a step would fill, in fewer steps.
    """
    missing = request.max_tokens - request.num_output_tokens
    return [request.num_output_tokens + i & 255 for i in range(max(1, missing - 1))]


class Engine(bed.Engine):
    """An engine that runs requests as fast as Python can."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pin = PIN
        self.settings = Settings(
            geometry=setup.geometry,
            max_model_len=setup.max_model_len,
            blocks_per_chunk=setup.blocks_per_chunk,
            budget=setup.budget,
            max_requests=setup.max_requests,
        )
        self.config = bed.vllm_config(self.settings, PIN)
        self.kv_cache_config, self._worker_plans = self._plan()
        self.groups = bed.groups_of(self.kv_cache_config)
        self.num_blocks = self.kv_cache_config.num_blocks
        self.bytes_per_block = sum(map(PIN.bytes_per_block, self._worker_plans))
        transfer = self.config.kv_transfer_config
        transfer.kv_connector_extra_config["cpu_bytes_to_use"] = (
            setup.host_bytes + setup.host_blocks * self.bytes_per_block
        )
        # As people leave it.
        transfer.kv_connector_extra_config.pop("offload_prompt_only", None)
        transfer.kv_connector_extra_config.update(setup.connector_options)
        transfer.kv_connector = setup.connector
        kv_cache_utils.init_none_hash(sha256)
        self.block_hasher = kv_cache_utils.get_request_block_hasher(
            PIN.hash_block_size(self.config, self.kv_cache_config), setup.hash_block
        )
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            log_stats=False,
            **PIN.scheduler_arguments(self.config, self.kv_cache_config),
        )
        self.workers = [
            self._worker(rank, plan) for rank, plan in enumerate(self._worker_plans)
        ]
        self.copies = Copies()
        for worker in self.workers:
            if setup.connector == "SimpleCPUOffloadConnector":
                worker.connector.worker_handler = SimpleWorker(
                    self.copies, self.bytes_per_block
                )
            else:
                worker.connector.connector_worker.spec.copies = self.copies
        self.register_caches()
        self.requests: dict[str, Request] = {}
        # By request: tokens that were on the GPU, and that a load brought.
        self.restored: dict[str, tuple[int, int]] = {}
        self._watch()

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def _plan(self) -> tuple[Any, list[Any]]:
        setup, cache = self.setup, self.config.cache_config
        layers = GEOMETRIES[setup.geometry].stages(1)
        if setup.kv_dtype == "fp8":
            layers = [
                {
                    name: dataclasses.replace(spec, dtype=torch.uint8)
                    for name, spec in stage.items()
                }
                for stage in layers
            ]
        cache.num_gpu_blocks_override = 1 << 24
        plan, _ = PIN.plan(self.config, layers)
        blocks = setup.gpu_blocks
        if blocks is None and setup.gpu_bytes is not None:
            blocks = setup.gpu_bytes // PIN.bytes_per_block(plan)
        if blocks is None:
            need = [bed._most_blocks(group, self.settings) for group in bed.groups_of(plan)]
            # A quarter of the pool may wait for copies.
            blocks = 4 * sum(need) + 1
        cache.num_gpu_blocks_override = blocks
        scheduler, workers = PIN.plan(self.config, layers)
        cache.num_gpu_blocks = scheduler.num_blocks
        return scheduler, workers

    def request(self, name: str, prompt: list[int], generate: int) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=generate, ignore_eos=True, temperature=0),
            pooling_params=None,
            block_hasher=self.block_hasher,
        )

    def add(self, name: str, prompt: list[int], generate: int) -> Request:
        request = self.request(name, prompt, generate)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def _watch(self) -> None:
        """See what each request need not compute, when it starts for the first time."""
        connector = self.scheduler.connector
        look_up, allocated = (
            connector.get_num_new_matched_tokens,
            connector.update_state_after_alloc,
        )
        local: dict[str, int] = {}

        def watched_look_up(request: Request, computed: int) -> Any:
            local[request.request_id] = computed
            return look_up(request, computed)

        def watched_allocation(request: Request, blocks: Any, external: int) -> Any:
            name = request.request_id
            self.restored.setdefault(name, (local.get(name, 0), external))
            return allocated(request, blocks, external)

        connector.get_num_new_matched_tokens = watched_look_up
        connector.update_state_after_alloc = watched_allocation

    def run(self, name: str, prompt: list[int], generate: int) -> None:
        """Run one request to its end."""
        request = self.add(name, prompt, generate)
        for _ in range(_PATIENCE):
            self.step(whole_answer)
            if request.is_finished():
                return
        raise RuntimeError(f"{name} does not end")

    def step(self, answer: Callable[[Request], list[int]]) -> SchedulerOutput:
        """One turn of the engine core's loop; `answer` gives what a request samples."""
        step = self.scheduler.schedule()
        names = list(step.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.requests[name]
            complete = request.num_computed_tokens >= request.num_tokens
            sampled.append(answer(request) if complete else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        result = self.execute(step, output, lambda rank: None)
        self.scheduler.update_from_output(step, result)
        return step

    def settle(self) -> None:
        """Let the jobs of the last step be submitted and reported."""
        for _ in range(3):
            self.step(lambda request: [1])

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, between two requests."""
        self.settle()
        if not self.scheduler.reset_prefix_cache():
            raise RuntimeError("blocks of the GPU are still in use")

    def close(self) -> None:
        self.scheduler.shutdown()
