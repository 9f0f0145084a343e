"""The KV cache shapes that the histories run on, at the models' real scale."""

import itertools
from dataclasses import dataclass, replace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

_LEAST_WINDOW = 64


@dataclass(frozen=True)
class Layer:
    """One attention layer that owns KV cache; `window` is None for full attention."""

    name: str
    kv_heads: int
    head_size: int
    window: int | None

    def spec(self, block_size: int) -> KVCacheSpec:
        shape = {
            "block_size": block_size,
            "num_kv_heads": self.kv_heads,
            "head_size": self.head_size,
            "dtype": torch.bfloat16,
        }
        if self.window is None:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(**shape, sliding_window=self.window)


@dataclass(frozen=True)
class Geometry:
    """What the planner needs to know of a model."""

    name: str
    layers: tuple[Layer, ...]
    block_size: int = 16

    @property
    def window(self) -> int | None:
        """The sliding window, or None where every layer is a full one."""
        return next((layer.window for layer in self.layers if layer.window), None)

    def with_window_divided(self, divisor: int) -> "Geometry":
        """The same blocks, of which fewer fill a window; it keeps a few of them."""
        if divisor == 1 or not self.window:
            return self
        window = max(self.window // divisor, min(self.window, _LEAST_WINDOW))
        return replace(
            self,
            layers=tuple(
                replace(layer, window=window) if layer.window else layer
                for layer in self.layers
            ),
        )

    def stages(self, count: int) -> list[dict[str, KVCacheSpec]]:
        """The layers of each pipeline stage, each stage longer than the one before."""
        parts = count * (count + 1) // 2
        ends = [len(self.layers) * n * (n + 1) // 2 // parts for n in range(count + 1)]
        return [
            {layer.name: layer.spec(self.block_size) for layer in self.layers[start:stop]}
            for start, stop in itertools.pairwise(ends)
        ]


def _interleaved(
    name: str,
    *,
    layers: int,
    every: int,
    sliding: tuple[int, int],
    full: tuple[int, int],
    window: int,
) -> Geometry:
    """Every `every`-th layer is a full one; `sliding` and `full` are heads and head size."""
    return Geometry(
        name,
        tuple(
            Layer(f"model.layers.{i}.self_attn.attn", *full, None)
            if (i + 1) % every == 0
            else Layer(f"model.layers.{i}.self_attn.attn", *sliding, window)
            for i in range(layers)
        ),
    )


def _gemma4(
    variant: str,
    layers: int,
    sliding_heads: int,
    full_heads: int,
    window: int = 1024,
    every: int = 6,
) -> Geometry:
    return _interleaved(
        f"gemma4-{variant}",
        layers=layers,
        every=every,
        sliding=(sliding_heads, 256),
        full=(full_heads, 512),
        window=window,
    )


# Layers that only read another layer's KV (18 in E4B, 20 in E2B) own no cache and do not
# appear here.
GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        _gemma4("31b", 60, 16, 4),
        _gemma4("31b-tp8", 60, 2, 1),
        _gemma4("26b-a4b", 30, 8, 2),
        _gemma4("12b", 48, 8, 1),
        _gemma4("e4b", 24, 2, 2, window=512),
        _gemma4("e2b", 15, 1, 1, window=512, every=5),
        # Controls: one group; two kinds of layer with one head size.
        _interleaved(
            "qwen3-32b", layers=64, every=1, sliding=(8, 128), full=(8, 128), window=0
        ),
        _interleaved(
            "gemma3-27b", layers=62, every=6, sliding=(16, 128), full=(16, 128), window=1024
        ),
        _interleaved(
            "gpt-oss-20b", layers=24, every=2, sliding=(8, 64), full=(8, 64), window=128
        ),
    )
}
