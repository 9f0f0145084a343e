"""A fault to plant in the connector, and what the tests that plant one tell: the seed that
showed it, and how soon.

    python -m pytest tests/histories tests/engine -k "test_bites or published"

prints it as a table for both beds.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest

Caught = Callable[[int, object], None]


@pytest.fixture
def caught(record_property: Callable[[str, object], None]) -> Caught:
    """A function that notes the seed and the finding, with the seconds until now."""
    start = time.monotonic()

    def note(seed: int, finding: object) -> None:
        record_property("caught", (seed, time.monotonic() - start, str(finding)))

    return note


def remove_protection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks go to new owners while a store still reads them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.block_pool import BlockPool

    if hasattr(BlockPool, "hold_blocks"):  # the series of v0.19.1 holds them
        monkeypatch.setattr(BlockPool, "hold_blocks", lambda *arguments: None)
        monkeypatch.setattr(BlockPool, "release_blocks", lambda *arguments: None)
        return
    real = OffloadingConnectorWorker.handle_preemptions

    def handle_preemptions(self: Any, metadata: Any) -> None:
        blind = copy.copy(metadata)
        blind.jobs_to_flush = None
        real(self, blind)

    monkeypatch.setattr(OffloadingConnectorWorker, "handle_preemptions", handle_preemptions)


def print_table(terminal: pytest.TerminalReporter, folder: str) -> None:
    """The rows of the tests in a folder that passed."""
    rows = [
        (report.nodeid.partition("::")[2], *value)
        for report in terminal.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "caught" and folder in report.nodeid
    ]
    if rows:
        terminal.section(f"planted faults, caught in {folder}")
    for test, seed, seconds, finding in rows:
        terminal.line(f"{test}: seed {seed}, {seconds:.1f} s, {finding.splitlines()[0][:90]}")
