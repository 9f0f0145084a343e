"""One prefix at a time: what is kept of it in host memory, and what its restoring moves."""

import math
from typing import Any

import numpy as np

from benchmarks.minimum import Group, prefix_blocks, runs

from . import policies
from .engine import PIN, Engine, Setup

_TAIL = 40


def _text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def _groups(engine: Engine) -> list[Group]:
    return [Group(group.block_size, group.window) for group in engine.groups]


def _common(engine: Engine) -> int:
    return math.lcm(*(group.block_size for group in engine.groups)) * (
        engine.setup.blocks_per_chunk
    )


def _copies(pairs: list[tuple[int, int]]) -> int:
    """Copies that the worker makes, per tensor, of (GPU block, host block) pairs to load."""
    try:
        from vllm.v1.kv_offload.worker.cpu_gpu import join_pages
    except ImportError:  # a release that joins nothing
        return len(pairs)
    if not pairs:
        return 0
    # As if all host memory were registered in one piece.
    return len(join_pages(np.array(pairs)[:, ::-1], 0, 1 << 62))


def _ample(geometry: str, tokens: int, **options: Any) -> Engine:
    """An engine for requests of up to `tokens`, with host memory for whatever it likes."""
    return Engine(
        Setup(
            geometry,
            host_bytes=1 << 45,
            max_model_len=tokens + 1024,
            budget=8192,
            max_requests=4,
            gpu_blocks=20 * (tokens // 16 + 600),
            **options,
        )
    )


def moved(
    geometry: str, kv_dtype: str, blocks_per_chunk: int, tokens: int, shares: list[float]
) -> list[dict[str, Any]]:
    """Restore a prefix, some of which the GPU has, and compare with the least there is."""
    engine = _ample(geometry, tokens, kv_dtype=kv_dtype, blocks_per_chunk=blocks_per_chunk)
    groups, common = _groups(engine), _common(engine)
    prompt = _text(1, tokens)
    engine.run("first", prompt, 2)
    engine.settle()
    rows = []
    for share in shares:
        engine.scheduler.reset_prefix_cache()
        if there := int(tokens * share) // common * common:
            engine.run(f"part{share}", [*prompt[:there], 300], 1)
            engine.settle()
        engine.copies.log = []
        name = f"again{share}"
        engine.run(name, [*prompt, *_text(100 + int(100 * share), _TAIL)], 1)
        loads = [copy for copy in engine.copies.log if not copy.is_store]
        local, loaded = engine.restored[name]
        least = prefix_blocks(groups, local + loaded, local)
        pairs = [pair for copy in loads for pair in zip(copy.gpu, copy.host, strict=True)]
        rows.append(
            {
                "share": share,
                "on_gpu": local,
                "restored": local + loaded,
                "bytes": sum(copy.num_bytes for copy in loads),
                "least_bytes": least * engine.bytes_per_block,
                "jobs": len(loads),
                "blocks": len(pairs),
                "runs": runs(pairs),
                "copies": _copies(pairs),
                "common": common,
            }
        )
        engine.settle()
    engine.close()
    return rows


def kept(geometry: str, tokens: int) -> dict[str, Any]:
    """Compute a prompt and see what the host tier, which has room, holds of it.

    Returns:
        Bytes: `kept` in all, `stored` by copies, `needed` without spare copies, which are
        the first to be evicted, and the `least` that restores the prompt.
    """
    result = _kept(geometry, tokens, "product")
    spare = PIN.TAG == "v0.19.1"
    needed = _kept(geometry, tokens, "no checkpoints") if spare else result
    return {**result, "needed": needed["kept"]}


def _kept(geometry: str, tokens: int, policy: str) -> dict[str, Any]:
    engine = _ample(geometry, tokens)
    policies.change(policy, engine)
    engine.run("first", _text(1, tokens), 2)
    engine.settle()
    pool = PIN.host_pool(engine.connector)
    least = prefix_blocks(_groups(engine), tokens)
    stored = engine.copies.stored.bytes
    engine.close()
    return {
        "kept": (pool.size - pool.free) * engine.bytes_per_block,
        "stored": stored,
        "least": least * engine.bytes_per_block,
    }


def per_gib(geometry: str, tokens: int, prompts: int) -> dict[str, Any]:
    """Fill a host tier that could hold `prompts` prompts at best; how much comes back?"""
    engine = _ample(geometry, tokens)
    least = prefix_blocks(_groups(engine), tokens)
    setup = engine.setup
    engine.close()
    blocks = least * prompts
    host_bytes = blocks * engine.bytes_per_block
    engine = Engine(Setup(**{**vars(setup), "host_bytes": host_bytes}))
    seeds = range(10, 10 + 2 * prompts)
    for seed in seeds:
        engine.run(f"first{seed}", _text(seed, tokens), 2)
        engine.settle()
    engine.scheduler.reset_prefix_cache()
    restored = 0
    for seed in reversed(seeds):
        # The latest first: what looking does to the order of eviction changes nothing.
        name = f"again{seed}"
        engine.run(name, [*_text(seed, tokens), 300], 1)
        restored += engine.restored[name][1]
        engine.scheduler.reset_prefix_cache()
    engine.close()
    gib = host_bytes / (1 << 30)
    return {
        "tokens_per_gib": restored / gib,
        "best_per_gib": prompts * tokens / gib,
        "gib": gib,
    }
