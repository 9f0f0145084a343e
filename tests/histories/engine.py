"""The real scheduler and connectors of the pin, around a model and copies that are fake."""

import contextlib
import copy
import functools
import json
import logging
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from .history import Settings
from .model import Group
from .stable import FIRST, hash_block

logging.getLogger("vllm").setLevel(logging.ERROR)

_NO_CONTEXT = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})


class FakeForCausalLM(torch.nn.Module):
    """What vLLM's configuration wants to see of a model."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor: ...

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor: ...


@functools.cache
def _model_folder() -> str:
    ModelRegistry.register_model(FakeForCausalLM.__name__, FakeForCausalLM)
    folder = tempfile.TemporaryDirectory(prefix="histories-model-")
    _model_folder.folder = folder  # Lives as long as the process.
    config = {
        "architectures": [FakeForCausalLM.__name__],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
    }
    Path(folder.name, "config.json").write_text(json.dumps(config))
    return folder.name


@functools.cache
def _model_config() -> ModelConfig:
    return ModelConfig(
        model=_model_folder(), skip_tokenizer_init=True, dtype="bfloat16", seed=0
    )


def vllm_config(settings: Settings, pin: ModuleType) -> VllmConfig:
    """The configuration of an engine with offloading, through vLLM's own checks."""
    # The runner decides on the shape of the scheduler's output.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(settings.runner == "v2"))
    model = copy.copy(_model_config())
    model.max_model_len = settings.max_model_len
    if settings.bidirectional:
        pin.make_bidirectional(model)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_requests,
            max_num_batched_tokens=settings.budget,
            max_model_len=settings.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            # As vLLM has it for such models.
            disable_chunked_mm_input=settings.bidirectional,
            disable_hybrid_kv_cache_manager=(
                None if settings.hybrid is None else not settings.hybrid
            ),
        ),
        cache_config=CacheConfig(
            block_size=settings.model.block_size,
            enable_prefix_caching=settings.prefix_caching,
            **pin.cache_options(settings),
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                # Any size will do until the blocks are planned.
                "cpu_bytes_to_use": 1,
                "eviction_policy": settings.eviction,
                "store_threshold": settings.store_threshold,
                **pin.connector_options(settings),
            },
        ),
        device_config=DeviceConfig("cpu"),
    )
    # The CPU platform of the test environment turned this off.
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.parallel_config.world_size = settings.workers
    if settings.stages:
        config.parallel_config.pipeline_parallel_size = settings.workers
    return config


@dataclass
class Worker:
    """One worker process: its connector and what its configuration says."""

    rank: int
    connector: KVConnectorBase_V1
    config: VllmConfig


class Engine:
    """A scheduler and workers as the engine core sets them up.

    Attributes:
        groups: KV cache groups as planned.
        num_blocks: blocks of the GPU pool.
        host_chunks: size of the host tier that was asked for.
    """

    def __init__(self, settings: Settings, pin: ModuleType) -> None:
        self.settings = settings
        self.pin = pin
        self.config = config = vllm_config(settings, pin)
        self.kv_cache_config, worker_plans = plan(settings, pin, config)
        self.groups = groups_of(self.kv_cache_config)
        self.num_blocks = self.kv_cache_config.num_blocks
        hash_block_size = pin.hash_block_size(config, self.kv_cache_config)
        factor = settings.blocks_per_chunk
        # vLLM wants a chunk for each group.
        self.host_chunks = max(
            len(self.groups),
            sum(settings.host_tokens // (group.block_size * factor) for group in self.groups),
        )
        chunk_bytes = factor * sum(map(pin.bytes_per_block, worker_plans))
        config.kv_transfer_config.kv_connector_extra_config["cpu_bytes_to_use"] = (
            self.host_chunks * chunk_bytes
        )
        kv_cache_utils.NONE_HASH = FIRST
        self.block_hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, hash_block)
        self.scheduler: Scheduler = (
            AsyncScheduler if settings.async_scheduling else Scheduler
        )(
            vllm_config=config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            **pin.scheduler_arguments(config, self.kv_cache_config),
        )
        # The model of the configuration sees no images; this engine's does.
        self.scheduler.max_num_encoder_input_tokens = settings.budget
        self.scheduler.encoder_cache_manager = EncoderCacheManager(2 * settings.max_model_len)
        self.workers = [self._worker(rank, plan) for rank, plan in enumerate(worker_plans)]
        self._worker_plans = worker_plans
        self._aggregator = KVOutputAggregator(settings.workers)

    def register_caches(self) -> None:
        """Show the workers' connectors their caches; the backends are made here."""
        for worker, plan in zip(self.workers, self._worker_plans, strict=True):
            caches = self.pin.kv_caches(worker.config, plan, _untouched_memory)
            with set_current_vllm_config(worker.config):
                worker.connector.register_kv_caches(caches)

    def execute(
        self, step: SchedulerOutput, output: ModelRunnerOutput, compute: Callable[[int], None]
    ) -> ModelRunnerOutput:
        """Run a step on every worker, the way a model runner calls its connector.

        Args:
            step: from the scheduler.
            output: of the model, without what the connectors add to it.
            compute: runs the model on the worker of the given rank.
        """
        outputs = []
        for worker in self.workers:
            mine = copy.copy(step)
            if len(self.workers) > 1:
                # Worker processes have copies of their own.
                mine.kv_connector_metadata = pickle.loads(
                    pickle.dumps(step.kv_connector_metadata)
                )
            run = functools.partial(compute, worker.rank)
            with _current_connector(worker.connector):
                result = copy.copy(output)
                result.kv_connector_output = self._run_worker(worker, mine, run)
                outputs.append(result)
        if len(outputs) == 1:
            return outputs[0]
        return self._aggregator.aggregate(outputs)

    def _run_worker(
        self, worker: Worker, step: SchedulerOutput, run: Callable[[], None]
    ) -> Any:
        if self.settings.runner == "v2":
            return self._run_v2(worker, step, run)
        worker.connector.handle_preemptions(step.kv_connector_metadata)
        if not step.total_num_scheduled_tokens:
            run()
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(
                step, worker.config
            ).kv_connector_output
        with (
            override_forward_context(_NO_CONTEXT),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step) as result,
        ):
            run()
        return result

    def _run_v2(self, worker: Worker, step: SchedulerOutput, run: Callable[[], None]) -> Any:
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        runner = ActiveKVConnector.__new__(ActiveKVConnector)
        runner.vllm_config = worker.config
        runner.kv_connector = worker.connector
        runner._pending_load_kwargs = None
        runner._disabled = False
        with override_forward_context(_NO_CONTEXT):
            runner.pre_forward(step)
            run()
            runner.finish_forward()
            return runner.post_forward(step.finished_req_ids)

    def _worker(self, rank: int, plan: KVCacheConfig) -> Worker:
        config = copy.copy(self.config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, plan)
        return Worker(rank, connector, config)


def plan(
    settings: Settings, pin: ModuleType, config: VllmConfig
) -> tuple[KVCacheConfig, list[KVCacheConfig]]:
    """What vLLM plans for the scheduler and for each worker.

    The pool has `gpu_ratio` times the blocks that the longest request needs.
    """
    geometry = settings.model
    layers = (
        geometry.stages(settings.workers)
        if settings.stages
        else geometry.stages(1) * settings.workers
    )
    # All that the groups depend on; planning takes long.
    key = (settings.model, settings.workers, settings.stages, settings.hybrid)
    if key not in _planned:
        config.cache_config.num_gpu_blocks_override = 1 << 24
        _planned[key] = groups_of(pin.plan(config, layers)[0])
    need = sum(_most_blocks(group, settings) for group in _planned[key])
    # One block is the null block.
    config.cache_config.num_gpu_blocks_override = int(need * settings.gpu_ratio) + 1
    scheduler, workers = pin.plan(config, layers)
    config.cache_config.num_gpu_blocks = scheduler.num_blocks
    return scheduler, workers


_planned: dict[tuple, list[Group]] = {}


def groups_of(config: KVCacheConfig) -> list[Group]:
    """The KV cache groups of a plan."""
    return [
        Group(
            number,
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.sliding_window
            if isinstance(group.kv_cache_spec, SlidingWindowSpec)
            else None,
        )
        for number, group in enumerate(config.kv_cache_groups)
    ]


def _most_blocks(group: Group, settings: Settings) -> int:
    """Blocks of a group that the longest request can hold at once."""
    tokens = settings.max_model_len
    if group.window is not None:
        tokens = min(tokens, group.window - 1 + settings.budget * settings.batches)
        return -(-tokens // group.block_size) + 1
    return -(-tokens // group.block_size)


@contextlib.contextmanager
def _current_connector(connector: KVConnectorBase_V1) -> Any:
    """Let vLLM's worker code find this connector."""
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


_NO_RESERVE = 0x4000
_arena: mmap.mmap | None = None


def _untouched_memory(start: int, size: int) -> torch.Tensor:
    """Addresses for caches of real size; nobody reads or writes them."""
    global _arena
    if _arena is None or len(_arena) < start + size:
        _arena = mmap.mmap(
            -1,
            max(start + size, 1 << 42),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE,
        )
    return torch.frombuffer(_arena, dtype=torch.int8, offset=start, count=size)
