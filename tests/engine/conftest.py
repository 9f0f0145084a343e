"""Checkpoints and settings for the tests; importing `environment` sets up vLLM."""

import os
import subprocess
import sys
from importlib.metadata import version

import environment
import pytest

from tests.histories.planted import caught, print_table  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that writes the checkpoint of that name, once, and returns its folder."""
    import checkpoints

    return checkpoints.writer(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def answers(checkpoint):
    """A function that gives the right answers of a case, found out for all of a model's."""
    from bed import cold_answers
    from cases import CASES, TESTED

    known = {}

    def of(case, seed):
        if (case.name, seed) not in known:
            tested = [(CASES[name], seed) for name, seed in sorted(TESTED)]
            tested = [(one, seed) for one, seed in tested if one.model == case.model]
            scripts = [one.script(seed) for one, seed in tested]
            found = cold_answers(checkpoint(case.model), scripts)
            known.update(zip(((one.name, seed) for one, seed in tested), found))
        return known[case.name, seed]

    return of


@pytest.fixture
def run(answers, checkpoint):
    """A function that runs a case."""
    import bed
    from cases import CASES, SEED

    def outcome(name, seed=SEED, **options):
        case = CASES[name]
        return bed.run(case, seed, checkpoint(case.model), answers(case, seed), **options)

    return outcome


@pytest.fixture(scope="session")
def in_stock(tmp_path_factory):
    """A function that waits for what the bed prints about the release as published."""
    from cases import STOCK

    from tests.histories.stock import stock_path

    path = str(stock_path(environment.RELEASE, tmp_path_factory.mktemp("stock")))
    case, seed, _ = STOCK[environment.RELEASE]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engine", f"--seed={seed}", f"--case={case}"],
        cwd=environment.ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([path, os.environ["PYTHONPATH"]]),
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        yield lambda: process.communicate()[0]
        process.kill()


@pytest.fixture(scope="session", autouse=True)
def _start_first(request):
    """What is only waited for runs beside the other tests."""
    if any("in_stock" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("in_stock")


def pytest_terminal_summary(terminalreporter) -> None:
    print_table(terminalreporter, "tests/engine")


def pytest_report_header() -> str:
    return f"vllm {version('vllm')}, torch {version('torch')}"
