"""Each part of the policy is worth something, and switching it off shows."""

import functools

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from benchmarks.inside import replay
from benchmarks.inside.engine import PIN
from benchmarks.traces import Piece, Turn

# Small windows: short prompts will do.
GEOMETRY = "gemma4-e2b"
ONLY_V0_19_1 = pytest.mark.skipif(PIN.TAG != "v0.19.1", reason="its policy is v0.33.0's own")


def say(*pieces: tuple[int, int], answer: tuple[int, int] = (99, 64)) -> Turn:
    return Turn(
        0.0,
        tuple(Piece(text, 0, length) for text, length in pieces),
        Piece(answer[0], 0, answer[1]),
    )


# In each, the last request begins with what one part of the policy kept.
CHAT = [say((1, 900), answer=(2, 640)), say((1, 900), (2, 640), (3, 100))]
AGAIN = [say((11, 900), answer=(12, 640)), say((11, 900), answer=(14, 640))]
SHARED = [say((21, 800), (i, 800 + i)) for i in (22, 23, 24)]
BRANCH = [say((31, 2500), (32, 500)), say((31, 2500), (33, 500))]


def restored(policy: str, turns: list[Turn], host_bytes: int = 1 << 36) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_turns", lambda *_: turns)
        if PIN.TAG == "v0.19.1":
            # So sparse that they do not stand in for the other parts.
            patch.setattr(
                OffloadingConnectorScheduler, "_get_checkpoint_interval", lambda *_: 2048
            )
        done = replay.replay(policy, GEOMETRY, host_bytes, None, None)
    return round(done["restored"] * done["prompt_tokens"])


@functools.cache
def all_together(policy: str) -> float:
    return restored(policy, [*CHAT, *AGAIN, *SHARED, *BRANCH])


@ONLY_V0_19_1
@pytest.mark.parametrize(
    "part", ["no answer ends", "no prompt ends", "no shared prefixes", "no checkpoints"]
)
def test_each_part_is_missed_where_it_helps(part: str) -> None:
    assert all_together(part) < all_together("product") <= all_together("everything")


@ONLY_V0_19_1
def test_everything_takes_more_memory() -> None:
    turns = [say((1, 4000)), say((2, 4000)), say((1, 4000))]
    some = 100 << 20
    assert restored("product", turns, some) > restored("everything", turns, some)


@pytest.mark.parametrize("gpu", [None, 1 << 30])
def test_a_replay_counts_every_token(gpu: int | None) -> None:
    done = replay.replay("product", GEOMETRY, 4 << 30, gpu, None, seed=3, turns=12)
    assert 0 < done["restored"] + done["on_gpu"] < 1
    assert done["stored"]["bytes"] > 0
    assert (done["on_gpu"] > 0) == (gpu is not None)
