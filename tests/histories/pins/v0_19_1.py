"""vLLM v0.19.1."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (
    common as offloading_common,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
)
from vllm.v1.kv_offload import spec as offloading_spec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

from ..history import Settings
from ..memory import CopyEngine
from ..transfers import HostPool, layer_specs, submit

TAG = "v0.19.1"
HITS_ARE_ALIGNED = True
# This release drops a token of a request that is preempted by a reset while a step is in
# flight which samples nothing for it; that has nothing to do with offloading.
RESETS_RUNNING_ASYNC = False
# The series lets chunks be given in blocks, as later releases do.
_CHUNKS_ARE_BLOCKS = hasattr(offloading_spec, "get_blocks_per_chunk")
# So does the series; in the release as published each worker makes its own jobs.
_SCHEDULER_MAKES_JOBS = hasattr(offloading_common, "JobId")


def connector_options(settings: Settings) -> dict[str, Any]:
    """What `kv_connector_extra_config` says in this release alone."""
    options = {"spec_name": LabelSpec.__name__, "spec_module_path": LabelSpec.__module__}
    if settings.blocks_per_chunk > 1:
        # The release as published knows chunks of one group only, and their size in tokens.
        if _CHUNKS_ARE_BLOCKS:
            options["blocks_per_chunk"] = settings.blocks_per_chunk
        else:
            size = settings.model.block_size
            options["block_size"] = size * settings.blocks_per_chunk
    return options


def cache_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `CacheConfig` that only this release has."""
    return {}


def make_bidirectional(model: ModelConfig) -> None:
    """Let the tokens of an image look at those behind them."""
    vars(model)["is_mm_prefix_lm"] = True


def plan(
    vllm_config: Any, layers: list[dict[str, KVCacheSpec]]
) -> tuple[KVCacheConfig, list[KVCacheConfig]]:
    """KV cache configuration of the scheduler and of each worker."""
    workers = kv_cache_utils.get_kv_cache_configs(
        vllm_config, [dict(specs) for specs in layers], [1 << 60] * len(layers)
    )
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    vllm_config.cache_config.block_size = min(
        group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups
    )
    return scheduler, workers


def bytes_per_block(config: KVCacheConfig) -> int:
    """What one GPU block takes on a worker, over all of its layers."""
    return sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks


def hash_block_size(vllm_config: Any, config: KVCacheConfig) -> int:
    """Tokens in one block hash."""
    return vllm_config.cache_config.block_size


def scheduler_arguments(vllm_config: Any, config: KVCacheConfig) -> dict[str, int]:
    return {"block_size": vllm_config.cache_config.block_size}


def kv_caches(
    vllm_config: Any, config: KVCacheConfig, memory: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The layers' caches, as a model runner lays them out in memory that nobody touches."""
    spec_of = layer_specs(config)
    caches = {}
    start = 0
    for tensor in config.kv_cache_tensors:
        raw = memory(start, tensor.size)
        start += tensor.size
        for name in tensor.shared_by:
            spec = spec_of[name]
            shape = _TritonLayout.get_kv_cache_shape(
                config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size
            )
            caches[name] = raw.view(spec.dtype).view(shape)
            vllm_config.compilation_config.static_forward_context[name] = _LAYER
    return caches


def jobs_of(step: SchedulerOutput, connector: KVConnectorBase_V1) -> dict[int, str]:
    """The jobs that a step makes, and whose they are."""
    if not _SCHEDULER_MAKES_JOBS:
        return {}
    loads = step.kv_connector_metadata.load_jobs
    stores = connector.connector_scheduler._store_jobs
    return {job: name for name, (job, _) in loads.items()} | {
        job: store.req_id for job, store in stores.items()
    }


def job_owner(connector: KVConnectorBase_V1, jobs: dict[int, str], job: int) -> str:
    """The request that a job belongs to."""
    if _SCHEDULER_MAKES_JOBS:
        return jobs[job]
    return connector.connector_worker._jobs[job][0]


def host_pool(connector: KVConnectorBase_V1) -> HostPool:
    """The scheduler's view of the host tier."""
    manager = connector.connector_scheduler.manager
    manager = getattr(manager, "_backing", manager)
    policy = manager._policy
    parts = [policy.blocks] if hasattr(policy, "blocks") else [policy.t1, policy.t2]
    return HostPool(
        size=manager._num_blocks,
        free=manager._get_num_free_blocks(),
        resident=sum(map(len, parts)),
        references=lambda: [block.ref_cnt for part in parts for block in part.values()],
        keys=lambda: [key for part in parts for key in part],
    )


def moved_bytes(stats: dict[str, Any]) -> dict[str, int]:
    """Bytes that one step's statistics report, stored and loaded."""
    return {
        name: sum(operation.op_size for operation in stats.get(key, ()))
        for name, key in (("store", "GPU_to_CPU"), ("load", "CPU_to_GPU"))
    }


def chunk_counts(stats: dict[str, Any]) -> dict[str, list[int]] | None:
    """What one step's statistics say of chunks per KV cache group, None if nothing.

    How many there are, and how many more were evicted and rejected.
    """
    reports = stats.get("chunks")
    if not reports:
        return None
    [report] = reports
    return {what: report[what] for what in ("offloaded", "evicted", "rejected")}


class LabelSpec(CPUOffloadingSpec):
    """The CPU backend with labels in place of bytes; its pool sizes are the real ones."""

    supports_hma = True
    copies: CopyEngine

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, OffloadingHandler]]:
        self.copies.allocate(self.num_blocks, self.block_size_factor)
        # The series lets them, in the backend that this one stands in for.
        self.copies.loads_wait_for_steps = _SCHEDULER_MAKES_JOBS
        sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
        group_bytes = [
            sum(sizes[ref.tensor_idx] for ref in refs) for refs in kv_caches.group_data_refs
        ]
        yield GPULoadStoreSpec, CPULoadStoreSpec, _Handler(self.copies, True, group_bytes)
        yield CPULoadStoreSpec, GPULoadStoreSpec, _Handler(self.copies, False, group_bytes)


class _Handler(OffloadingHandler):
    def __init__(self, copies: CopyEngine, is_store: bool, group_bytes: list[int]) -> None:
        self.copies = copies
        self.is_store = is_store
        self.group_bytes = group_bytes

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        gpu, cpu = spec if self.is_store else reversed(spec)
        submit(self.copies, self.group_bytes, job_id, self.is_store, gpu, cpu)
        return True

    def get_finished(self) -> list[TransferResult]:
        names = ("GPU", "CPU") if self.is_store else ("CPU", "GPU")
        return [
            TransferResult(
                job_id=copy.job,
                success=not copy.failed,
                transfer_size=copy.num_bytes,
                transfer_time=1e-3,
                transfer_type=names,
            )
            for copy in self.copies.poll(self.is_store)
        ]

    def wait(self, job_ids: set[int]) -> None:
        self.copies.wait(self.is_store, job_ids)


class _TritonLayout:
    """The shape that the Triton attention backend, the one of Gemma 4, gives its cache."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class _Layer(AttentionLayerBase):
    def get_attn_backend(self) -> type:
        return _TritonLayout

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        return None


_LAYER = _Layer()
