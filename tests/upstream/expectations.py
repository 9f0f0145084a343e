"""A pytest plug-in that holds vLLM's own tests to a recorded list of what cannot pass here.

    python -m pytest -p expectations --expectations known/v0.19.1.toml tests/v1/kv_offload

The list names tests that fail or skip without a GPU or a network, and says why:

    [[fails]]
    reason = "copies with CUDA"
    tests = { "tests/v1/kv_offload/test_cpu_gpu.py::test_transfer[*]" = 8 }

    [[skips]]
    reason = "..."
    tests = { ... }

    [[may_skip]]
    reason = "needs a permission that not every machine gives"
    tests = { ... }

A key is the id of a test, or of a file that skips as a whole; `*` stands for anything, and
the number is how many ids the key names. The list can only be true: a test that fails or skips
without being listed is a failure, so is a listed one that passes, and a key that names
another number of tests is an error before anything runs.
"""

import re
import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--expectations", type=Path, metavar="FILE", help="the list of what cannot pass here"
    )


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--expectations"):
        config.pluginmanager.register(Expectations(path))


class Record:
    """One key of the list, and the tests found for it."""

    def __init__(self, outcome: str, reason: str, key: str, number: int):
        self.outcome, self.reason, self.key, self.number = outcome, reason, key, number
        self.found: set[str] = set()
        pieces = (re.escape(piece) for piece in key.split("*"))
        self.matches = re.compile(".*".join(pieces), re.DOTALL).fullmatch

    def within(self, nodeid: str) -> bool:
        """Whether all tests of this key are below that node."""
        return self.key == nodeid or self.key.startswith((f"{nodeid}/", f"{nodeid}::"))


class Expectations:
    def __init__(self, path: Path):
        self._path = path
        self._of: dict[str, Record] = {}
        try:
            groups = tomllib.loads(path.read_text())
            self._records = [
                Record(outcome, group["reason"], key, number)
                for outcome in ("fails", "skips", "may_skip")
                for group in groups.pop(outcome, ())
                for key, number in group["tests"].items()
            ]
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise pytest.UsageError(f"{path}: {error}") from None
        except KeyError as error:
            raise pytest.UsageError(f"{path}: an entry lacks {error}") from None
        if groups:
            raise pytest.UsageError(
                f"{path}: neither fails, skips nor may_skip: {', '.join(groups)}"
            )

    def _find(self, nodeid: str) -> Record | None:
        found = [record for record in self._records if record.matches(nodeid)]
        if len(found) > 1:
            keys = ", ".join(record.key for record in found)
            raise pytest.UsageError(f"{self._path}: {nodeid} is named more than once: {keys}")
        for record in found:
            record.found.add(nodeid)
            self._of[nodeid] = record
        return self._of.get(nodeid)

    def _expects(self, nodeid: str, outcome: str) -> bool:
        return nodeid in self._of and self._of[nodeid].outcome == outcome

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector):
        report = yield
        if report.skipped:
            self._find(report.nodeid)
            if not self._expects(report.nodeid, "skips"):
                _fail(report, f"skips as a whole, and {self._path} does not say so")
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for item in items:
            record = self._find(item.nodeid)
            if record is not None and record.outcome == "fails":
                item.add_marker(pytest.mark.xfail(reason=record.reason, strict=True))
            # vLLM's mark for tests that leave nothing behind on a GPU; without it a second
            # of garbage collection follows each test.
            if "dist_init" not in item.fixturenames:
                item.add_marker("skip_global_cleanup")
        if config.option.keyword or config.option.markexpr or config.option.deselect:
            return
        asked_for = [_nodeid(config, argument) for argument in config.args]
        wrong = [
            f"{record.key} names {len(record.found)} tests, and not {record.number}"
            for record in self._records
            if len(record.found) != record.number
            and ("." in asked_for or any(map(record.within, asked_for)))
        ]
        if wrong:
            raise pytest.UsageError(f"{self._path}: " + "; ".join(wrong))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        report = yield
        if hasattr(report, "wasxfail"):
            return report
        expected = self._expects(item.nodeid, "skips")
        if report.skipped and not (expected or self._expects(item.nodeid, "may_skip")):
            _fail(report, f"skips, and {self._path} does not say so: {report.longrepr[2]}")
        if report.passed and report.when == "call" and expected:
            _fail(report, f"does not skip; take it out of {self._path}")
        return report


def _nodeid(config: pytest.Config, argument: str) -> str:
    path, colons, name = argument.partition("::")
    path = (config.invocation_params.dir / path).relative_to(config.rootpath).as_posix()
    return path + colons + name


def _fail(report: pytest.CollectReport | pytest.TestReport, why: str) -> None:
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} {why}"
