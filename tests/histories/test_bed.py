"""The bed itself: what it stands on holds."""

import numpy as np
import pytest

from . import engine, pins
from .cases import history
from .findings import Violation
from .generate import random_history
from .history import History, Settings
from .memory import Copy, CopyEngine
from .shrink import failure_of, shrink
from .streams import Stream, text
from .transfers import block_pairs
from .world import Report, replay


def test_labels_tell_prefix_group_and_length_apart() -> None:
    one = Stream(np.concatenate((text("a", 40), text("b", 30))))
    same = Stream(np.concatenate((text("a", 40), text("b", 10))))
    other = Stream(np.concatenate((text("a", 39), text("c", 31))))
    assert (one.labels(0, slice(1, 51)) == same.labels(0, slice(1, 51))).all()
    differs = one.labels(0, slice(1, 71)) != other.labels(0, slice(1, 71))
    assert list(differs) == [False] * 39 + [True] * 31
    labels = np.concatenate([one.labels(group, slice(1, 71)) for group in range(6)])
    assert len(np.unique(labels)) == len(labels)
    assert labels.all()


def test_generated_tokens_follow_from_the_tokens_before() -> None:
    one, two = Stream(text("a", 50)), Stream(text("a", 50))
    one.grow_to(90)
    two.grow_to(70)
    assert one.tokens[:70] == two.tokens
    rest = Stream(np.array(one.tokens[:60]))
    rest.grow_to(90)
    assert rest.tokens == one.tokens


def test_history_survives_json() -> None:
    for seed in range(20):
        one = random_history(seed, {"aborts": 0.3, "resets": 0.2})
        assert History.from_json(one.to_json()) == one


# Groups as vLLM plans them at --block-size 16: sliding and full layers in each, their block
# sizes, the window.
_GROUPS = {
    "gemma4-31b": (5, 16, 32, 1024),
    "gemma4-31b-tp8": (5, 16, 16, 1024),
    "gemma4-26b-a4b": (5, 16, 32, 1024),
    "gemma4-12b": (5, 16, 64, 1024),
    "gemma4-e4b": (5, 32, 16, 512),
    "gemma4-e2b": (4, 32, 16, 512),
}


@pytest.mark.parametrize("geometry", _GROUPS)
def test_geometry_is_planned_as_on_a_gpu(geometry: str) -> None:
    count, sliding_block, full_block, window = _GROUPS[geometry]
    settings, pin = Settings(geometry=geometry), pins.current()
    config = engine.vllm_config(settings, pin)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    planned, _ = engine.plan(settings, pin, config)
    groups = [(group.block_size, group.window) for group in engine.groups_of(planned)]
    assert groups == [(sliding_block, window)] * count + [(full_block, None)]


def test_a_transfer_is_read_group_by_group() -> None:
    # Three groups in chunks of four: blocks 2 to 8 of a request, none, and block 7.
    gpu, host = block_pairs(range(20, 28), (7, 0, 1), (2, 0, 7), (5, 6, 9, 3), 4)
    assert gpu == list(range(20, 28))
    assert host == [22, 23, 24, 25, 26, 27, 36, 15]
    for chunks in ((5, 6, 9), (5, 6, 9, 3, 4)):
        with pytest.raises(Violation, match="I6"):
            block_pairs(range(20, 28), (7, 0, 1), (2, 0, 7), chunks, 4)


class _NeverMoves(CopyEngine):
    def perform(self, copy: Copy) -> None:
        pass


def test_shrinking_keeps_the_failure_and_drops_the_rest() -> None:
    def run(candidate: History) -> Report:
        return replay(candidate, _NeverMoves)

    failing = (history("one-group", "qwen3-32b", seed) for seed in range(30))
    big = next(one for one in failing if failure_of(one, run) is not None)
    invariant = failure_of(big, run).invariant
    small = shrink(big, invariant, run, tries=40)
    assert len(small.operations) < len(big.operations) / 2
    assert failure_of(small, run).invariant == invariant
