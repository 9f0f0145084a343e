"""The bed finds what is wrong on purpose: in a backend, in a connector, in the releases."""

import copy
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)

from . import pins
from .cases import CASES
from .findings import Violation
from .generate import random_history
from .memory import Copy, CopyEngine
from .shrink import failure_of
from .stock import stock_path
from .world import replay

PIN = pins.current().TAG
ROOT = Path(__file__).parents[2]


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
def test_faulty_backend(backend: type[CopyEngine], case: str) -> None:
    if case != "one-group" and _cannot_offload(case):
        pytest.skip("this tree cannot offload that model yet")
    seed, violation = _first_finding(CASES[case], backend)
    assert violation.invariant in ("I1", "I6"), f"seed {seed}: {violation}"


def _cannot_offload(case: str) -> bool:
    violation = failure_of(random_history(0, CASES[case]))
    return violation is not None and violation.invariant == "I4"


# --- a connector without its protection ---


def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are given away while a store still reads them."""
    real = OffloadingConnectorWorker.handle_preemptions

    def handle_preemptions(self: Any, metadata: Any) -> None:
        blind = copy.copy(metadata)
        for name in ("reqs_to_flush", "jobs_to_flush"):
            if hasattr(blind, name):
                setattr(blind, name, None)
        real(self, blind)

    monkeypatch.setattr(OffloadingConnectorWorker, "handle_preemptions", handle_preemptions)


def _never_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's blocks are free as soon as it has ended, whatever still reads them."""
    finish = OffloadingConnectorScheduler.request_finished
    get_finished = OffloadingConnectorWorker.get_finished

    def request_finished(self: Any, *arguments: Any) -> tuple[bool, Any]:
        return False, finish(self, *arguments)[1]

    def without_stores(self: Any, ended: set[str]) -> tuple[set[str], set[str]]:
        return set(), get_finished(self, ended)[1]

    monkeypatch.setattr(OffloadingConnectorScheduler, "request_finished", request_finished)
    monkeypatch.setattr(OffloadingConnectorWorker, "get_finished", without_stores)


_PROTECTIONS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "v0.19.1": [_never_waits, _never_holds],
    "v0.33.0": [_never_waits],
}


@pytest.mark.parametrize("remove", _PROTECTIONS[PIN], ids=lambda remove: remove.__name__)
def test_connector_without_protection(
    remove: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "geometry": "qwen3-32b",
        "gpu_ratio": 1.0,
        "store_delay": (5, 20),
        "length": 16,
        "resets": 0.0,
        "answers": (16, 33, 80),
    }
    remove(monkeypatch)
    seed, violation = _first_finding(given)
    assert violation.invariant == "I2", f"seed {seed}: {violation}"
    monkeypatch.undo()
    assert failure_of(random_history(seed, given)) is None


# --- the releases as published ---

_STOCK: dict[str, tuple[list[str], str]] = {
    # The settings of the report: 120 GiB for Gemma 4 31B with a large context.
    "v0.19.1": (
        [
            "--case=long-context",
            "--geometry=gemma4-31b",
            f"--set=host_tokens={(120 << 30) // (880 << 10)}",
            "--histories=3",
        ],
        r"breaks I4: .* uses host block \d+, which lies outside the pool",
    ),
    # A sliding chunk of which a part was freed lands in the wrong places.
    "v0.33.0": (
        ["--case=chunks-short-window", "--histories=60"],
        r"breaks (I6: .* into slot|I1: .* reads host block)",
    ),
}


def test_stock_release(tmp_path: Path) -> None:
    arguments, finding = _STOCK[PIN]
    path = [stock_path(PIN, tmp_path), ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "tests.histories", "--shrink=0", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert re.search(finding, done.stdout), done.stdout + done.stderr
