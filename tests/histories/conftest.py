"""Processes that some tests only wait for; they start first and run beside the others."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import pins
from .planted import caught, print_table  # noqa: F401  (a fixture)
from .stock import stock_path

_ROOT = Path(__file__).parents[2]
_TAG = pins.current().TAG

# What `python -m tests.histories` must find in the releases as published.
_IN_STOCK = {
    # The settings of the report: 120 GiB for Gemma 4 31B with a large context.
    "v0.19.1": [
        "--case=long-context",
        "--geometry=gemma4-31b",
        f"--set=host_tokens={(120 << 30) // (880 << 10)}",
        "--histories=3",
    ],
    # Chunks of sliding layers with holes.
    "v0.33.0": [
        "--case=chunks-short-window",
        "--geometry=gpt-oss-20b",
        "--histories=100",
    ],
}
_TRACE = (
    "from tests.histories.cases import history; "
    "from tests.histories.world import replay; "
    "print('trace', replay(history('slow-copies', 'gemma4-e2b', 3)).trace)"
)


def _start(arguments: list[str], path: list[Path], **variables: str) -> subprocess.Popen:
    known = filter(None, [os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, path), str(_ROOT), *known]),
            **variables,
        },
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="session")
def in_stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Output of the bed on the release as published."""
    path = [stock_path(_TAG, tmp_path_factory.mktemp("stock"))]
    command = ["-m", "tests.histories", "--shrink=0", "--known", "--jobs=1", *_IN_STOCK[_TAG]]
    with _start(command, path) as process:
        yield lambda: process.communicate()[0]
        process.kill()


@pytest.fixture(scope="session")
def trace_elsewhere() -> Iterator[Callable[[], str]]:
    """Output with the trace of a history, in a process that hashes differently."""
    with _start(["-c", _TRACE], [], PYTHONHASHSEED="12345") as process:
        yield lambda: process.communicate()[0]
        process.kill()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    print_table(terminalreporter, "tests/histories")


@pytest.fixture(scope="session", autouse=True)
def _start_first(request: pytest.FixtureRequest) -> None:
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in ("in_stock", "trace_elsewhere"):
        if name in wanted:
            request.getfixturevalue(name)
