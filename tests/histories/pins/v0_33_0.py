"""vLLM v0.33.0."""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_planning, kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from ..history import Settings
from ..memory import CopyEngine
from ..transfers import HostPool, layer_specs, submit

TAG = "v0.33.0"
# This release resumes at any token: the last block is loaded whole, and filled again from
# there.
HITS_ARE_ALIGNED = False
RESETS_RUNNING_ASYNC = True


def connector_options(settings: Settings) -> dict[str, Any]:
    """What `kv_connector_extra_config` says in this release alone."""
    return {
        "spec_name": LabelSpec.__name__,
        "spec_module_path": LabelSpec.__module__,
        "blocks_per_chunk": settings.blocks_per_chunk,
        "offload_prompt_only": settings.prompt_only,
        "sync_load_budget_bytes": settings.sync_load_bytes,
    }


def cache_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `CacheConfig` that only this release has."""
    if settings.retention == "default":
        return {}
    interval = None if settings.retention == "all" else settings.retention
    return {"prefix_cache_retention_interval": interval}


def make_bidirectional(model: ModelConfig) -> None:
    """Let the tokens of an image look at those behind them."""
    model.model_arch_config = replace(model.model_arch_config, is_mm_prefix_lm=True)


def plan(
    vllm_config: Any, layers: list[dict[str, KVCacheSpec]]
) -> tuple[KVCacheConfig, list[KVCacheConfig]]:
    """KV cache configuration of the scheduler and of each worker."""
    register_all_kvcache_specs(vllm_config)
    vllm_config.cache_config.kv_cache_layout = "LBNHC"
    groups = kv_cache_planning.get_global_kv_cache_groups(vllm_config, layers)
    workers = kv_cache_planning.get_kv_cache_configs(
        vllm_config, layers, [1 << 60] * len(layers), groups
    )
    for config in workers:
        config.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(workers)
    vllm_config.cache_config.block_size = min(
        group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups
    )
    scheduler_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(
        scheduler, vllm_config
    )
    alignment = kv_cache_utils.resolve_cache_hit_alignment_tokens(
        scheduler, vllm_config, scheduler_size, hash_size
    )
    for config in (scheduler, *workers):
        config.hash_block_size = hash_size
        config.cache_hit_alignment_tokens = alignment
    return scheduler, workers


def bytes_per_block(config: KVCacheConfig) -> int:
    """What one GPU block takes on a worker, over all of its layers."""
    return config.kv_cache_tensors[0].size // config.num_blocks


def hash_block_size(vllm_config: Any, config: KVCacheConfig) -> int:
    """Tokens in one block hash."""
    return kv_cache_utils.resolve_kv_cache_block_sizes(config, vllm_config)[1]


def scheduler_arguments(vllm_config: Any, config: KVCacheConfig) -> dict[str, int]:
    block_size, hash_size = kv_cache_utils.resolve_kv_cache_block_sizes(config, vllm_config)
    return {"block_size": block_size, "hash_block_size": hash_size}


def kv_caches(vllm_config: Any, config: KVCacheConfig, memory: Any) -> dict[str, torch.Tensor]:
    """The layers' caches, as a model runner lays them out in memory that nobody touches."""
    spec_of = layer_specs(config)
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    caches = {}
    for tensor in config.kv_cache_tensors:
        views = create_kv_cache_views(
            memory(0, tensor.size),
            spec_of[tensor.layers[0]],
            config.num_blocks,
            layout,
            tensor,
        )
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def jobs_of(step: SchedulerOutput, connector: KVConnectorBase_V1) -> dict[int, str]:
    """The jobs that a step makes, and whose they are."""
    made = step.kv_connector_metadata
    return {
        job: transfer.req_id
        for jobs in (made.store_jobs, made.load_jobs)
        for job, transfer in jobs.items()
    }


def job_owner(connector: KVConnectorBase_V1, jobs: dict[int, str], job: int) -> str:
    """The request that a job belongs to."""
    return jobs[job]


def host_pool(connector: KVConnectorBase_V1) -> HostPool:
    """The scheduler's view of the host tier."""
    manager = connector.connector_scheduler.manager
    policy = manager._policy
    parts = [policy.chunks] if hasattr(policy, "chunks") else [policy.t1, policy.t2]
    return HostPool(
        size=manager._num_chunks,
        free=manager._get_num_free_chunks(),
        resident=sum(map(len, parts)),
        references=lambda: [chunk.ref_cnt for part in parts for chunk in part.values()],
        keys=lambda: [key for part in parts for key in part],
    )


def moved_bytes(stats: dict[str, Any]) -> dict[str, int]:
    """Bytes that one step's statistics report, stored and loaded."""
    values = stats["data"]
    return {
        name: sum(values.get(f"vllm:kv_offload_{name}_bytes", {}).values())
        for name in ("store", "load")
    }


def chunk_counts(stats: dict[str, Any]) -> dict[str, list[int]] | None:
    """This release does not count chunks per KV cache group."""
    return None


class LabelSpec(CPUOffloadingSpec):
    """The CPU backend with labels in place of bytes; its pool sizes are the real ones."""

    copies: CopyEngine

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        self.copies.allocate(self.num_chunks, self.blocks_per_chunk)
        return _Worker(
            self.copies,
            [sum(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs],
        )


class _Worker(OffloadingWorker):
    def __init__(self, copies: CopyEngine, group_bytes: list[int]) -> None:
        self.copies = copies
        self.group_bytes = group_bytes

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        submit(self.copies, self.group_bytes, job_id, True, src_spec, dst_spec)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        submit(self.copies, self.group_bytes, job_id, False, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                job_id=copy.job,
                success=not copy.failed,
                transfer_size=copy.num_bytes,
                transfer_time=1e-3,
            )
            for is_store in (True, False)
            for copy in self.copies.poll(is_store)
        ]

    def wait(self, job_ids: set[int]) -> None:
        for is_store in (True, False):
            self.copies.wait(is_store, job_ids)
