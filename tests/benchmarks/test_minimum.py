"""The formula that all ratios are taken against, checked against figures worked by hand."""

import pytest

from benchmarks.inside.engine import Engine, Setup
from benchmarks.minimum import Group, prefix_blocks, runs

KIB, MIB = 1 << 10, 1 << 20
# Geometry: bytes that a token takes in full-attention layers, and one sliding window.
BY_HAND = {
    "gemma4-31b": (80 * KIB, 800 * MIB),
    "gemma4-26b-a4b": (20 * KIB, 200 * MIB),
    "gemma4-12b": (16 * KIB, 320 * MIB),
    "gemma4-e4b": (16 * KIB, 20 * MIB),
    "gemma4-e2b": (6 * KIB, 6 * MIB),
    "qwen3-32b": (256 * KIB, 0),
}


@pytest.mark.parametrize("geometry", BY_HAND)
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_least_of_a_prefix_on_the_planned_groups(geometry: str, kv_dtype: str) -> None:
    per_token, window = BY_HAND[geometry]
    engine = Engine(Setup(geometry, host_bytes=1 << 40, max_model_len=1024, kv_dtype=kv_dtype))
    groups = [Group(group.block_size, group.window) for group in engine.groups]
    half = 2 if kv_dtype == "fp8" else 1
    assert engine.bytes_per_block * prefix_blocks(groups, 8192) == (
        (8192 * per_token + window) // half
    )
    # What the GPU has of the full layers is not needed; all of the window is.
    assert engine.bytes_per_block * prefix_blocks(groups, 8192, 4096) == (
        (4096 * per_token + window) // half
    )
    engine.close()


@pytest.mark.parametrize(
    ("tokens", "on_gpu", "blocks"),
    [(0, 0, 0), (16, 0, 1), (1024, 0, 64), (1040, 0, 64), (4096, 4032, 4), (4096, 4096, 0)],
)
def test_blocks_of_a_window(tokens: int, on_gpu: int, blocks: int) -> None:
    assert Group(16, 1024).blocks(tokens, on_gpu) == blocks


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert runs([]) == 0
    assert runs([(1, 7), (2, 8), (3, 9)]) == 1
    assert runs([(1, 7), (2, 9), (3, 10), (5, 11)]) == 3
