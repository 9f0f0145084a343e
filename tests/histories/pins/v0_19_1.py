"""vLLM v0.19.1."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

from ..history import Settings
from ..memory import CopyEngine
from ..transfers import HostPool, block_pairs

TAG = "v0.19.1"
RUNNERS = ("v1",)
HITS_ARE_ALIGNED = True
# This release drops a token of a request that is preempted by a reset while a step is in
# flight which samples nothing for it; that has nothing to do with offloading.
RESETS_RUNNING_ASYNC = False


def connector_options(settings: Settings, groups: int, host_bytes: int) -> dict[str, Any]:
    """`kv_connector_extra_config` for these settings."""
    options: dict[str, Any] = {
        "spec_name": LabelSpec.__name__,
        "spec_module_path": LabelSpec.__module__,
        "cpu_bytes_to_use": host_bytes,
        "eviction_policy": settings.eviction,
        "store_threshold": settings.store_threshold,
        "blocks_per_chunk": settings.blocks_per_chunk,
    }
    if groups == 1 and settings.blocks_per_chunk > 1:
        options["block_size"] = 16 * settings.blocks_per_chunk
    return options


def cache_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `CacheConfig` that only this release has."""
    return {}


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
    spec_of = {}
    for group in config.kv_cache_groups:
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            spec_of[name] = spec
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


def attach(connector: KVConnectorBase_V1, copies: CopyEngine) -> None:
    """Give the worker's backend its copy engine."""
    connector.connector_worker.spec.copies = copies


def jobs_of(step: SchedulerOutput) -> dict[int, str]:
    """The jobs that a step makes, and whose they are: here the workers make them."""
    return {}


def job_owner(connector: KVConnectorBase_V1, jobs: dict[int, str], job: int) -> str:
    """The request that a job belongs to."""
    return connector.connector_worker._jobs[job][0]


def connector_parts(connector: KVConnectorBase_V1) -> list[object]:
    """The objects that keep the connector's state."""
    return [
        part
        for part in (connector.connector_scheduler, connector.connector_worker)
        if part is not None
    ]


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
    )


def moved_bytes(stats: dict[str, Any]) -> dict[str, int]:
    """Bytes that one step's statistics report, stored and loaded."""
    return {
        name: sum(operation.op_size for operation in stats.get(key, ()))
        for name, key in (("store", "GPU_to_CPU"), ("load", "CPU_to_GPU"))
    }


class LabelSpec(CPUOffloadingSpec):
    """The CPU backend with labels in place of bytes; its pool sizes are the real ones."""

    copies: CopyEngine

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, OffloadingHandler]]:
        self.copies.allocate(self.num_blocks, self.block_size_factor)
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
        pairs = block_pairs(
            gpu.block_ids.tolist(),
            gpu.group_sizes,
            gpu.block_indices or [0] * len(gpu.group_sizes),
            cpu.block_ids.tolist(),
            self.copies.blocks_per_chunk,
        )
        num_bytes = sum(
            size * each for size, each in zip(gpu.group_sizes, self.group_bytes, strict=True)
        )
        self.copies.submit(job_id, self.is_store, *pairs, num_bytes)
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
