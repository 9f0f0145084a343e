"""The bed finds what is wrong on purpose, in a backend and in a connector."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from . import engine, pins
from .cases import CASES
from .findings import Violation
from .generate import random_history
from .memory import Copy, CopyEngine
from .planted import Caught, remove_protection
from .shrink import failure_of
from .world import replay


def _first_finding(
    given: dict[str, Any], copies: type[CopyEngine] = CopyEngine
) -> tuple[int, Violation]:
    for seed in range(30):
        violation = failure_of(
            random_history(seed, given), lambda history: replay(history, copies)
        )
        if violation is not None:
            return seed, violation
    pytest.fail("30 histories did not find it")


# --- a faulty backend ---


class SwapsTwoBlocks(CopyEngine):
    def perform(self, copy: Copy) -> None:
        if len(copy.host) > 1:
            copy.host[[0, -1]] = copy.host[[-1, 0]]
        super().perform(copy)


class LosesABlock(CopyEngine):
    def perform(self, copy: Copy) -> None:
        short = replace(copy, gpu=copy.gpu[:-1], host=copy.host[:-1])
        super().perform(short)


class CopiesOneStepLate(CopyEngine):
    """Says that a copy is done one step before it is."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.late: deque[tuple[int, Copy]] = deque()

    def perform(self, copy: Copy) -> None:
        self.late.append((self._now(), copy))

    def poll(self, is_store: bool) -> list[Copy]:
        while self.late and self.late[0][0] < self._now():
            super().perform(self.late.popleft()[1])
        return super().poll(is_store)


@pytest.mark.parametrize("backend", [SwapsTwoBlocks, LosesABlock, CopiesOneStepLate])
@pytest.mark.parametrize("case", ["one-group", "gemma4-31b"])
def test_faulty_backend(backend: type[CopyEngine], case: str, caught: Caught) -> None:
    seed, violation = _first_finding(CASES[case], backend)
    caught(seed, violation)
    assert violation.invariant == "I1", f"seed {seed}: {violation}"
    assert failure_of(random_history(seed, CASES[case])) is None


# --- requests that are not told apart ---


@pytest.mark.parametrize("case", ["images", "salts-and-adapters"])
def test_hashes_of_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, case: str, caught: Caught
) -> None:
    """Requests with other images, salts or adapters hit each other's blocks."""
    real = engine.hash_block
    monkeypatch.setattr(engine, "hash_block", lambda value: real((*value[:2], None)))
    seed, violation = _first_finding(
        CASES[case] | {"geometry": "gemma4-31b", "bidirectional": False}
    )
    caught(seed, violation)
    assert violation.invariant == "I1", f"seed {seed}: {violation}"


# --- a connector without its protection ---


def test_connector_without_protection(monkeypatch: pytest.MonkeyPatch, caught: Caught) -> None:
    given = {
        "geometry": "qwen3-32b",
        "gpu_ratio": 1.0,
        "store_delay": (5, 20),
        "length": 16,
        "resets": 0.0,
        "answers": (16, 33, 80),
    }
    remove_protection(monkeypatch)
    seed, violation = _first_finding(given)
    caught(seed, violation)
    assert violation.invariant == "I2", f"seed {seed}: {violation}"
    monkeypatch.undo()
    assert failure_of(random_history(seed, given)) is None


# --- statistics that are wrong ---


@pytest.mark.skipif(
    pins.current().TAG == "v0.33.0", reason="does not count chunks per KV cache group"
)
def test_chunks_of_another_group(monkeypatch: pytest.MonkeyPatch, caught: Caught) -> None:
    real = OffloadingConnector.get_kv_connector_stats

    def mixed_up(self: OffloadingConnector) -> Any:
        stats = real(self)
        for report in stats.data.get("chunks", ()) if stats else ():
            report["offloaded"].reverse()
        return stats

    monkeypatch.setattr(OffloadingConnector, "get_kv_connector_stats", mixed_up)
    seed, violation = _first_finding(CASES["gemma4-31b"])
    caught(seed, violation)
    assert violation.invariant == "metrics", f"seed {seed}: {violation}"
    monkeypatch.undo()
    assert failure_of(random_history(seed, CASES["gemma4-31b"])) is None
