"""The plug-in that holds vLLM's tests to the recorded list of what cannot pass here."""

import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_fails(number):
    assert number == 3

@pytest.fixture
def broken():
    raise RuntimeError

def test_cannot_start(broken):
    pass

@pytest.mark.skip(reason="no GPU")
def test_skips():
    pass

@pytest.mark.xfail
def test_known_to_its_authors():
    assert False
"""
RECORDED = """
[[fails]]
reason = "no GPU"
tests = { "test_some.py::test_fails[*]" = 2, "test_some.py::test_cannot_start" = 1 }

[[skips]]
reason = "no GPU"
tests = { "test_some.py::test_skips" = 1 }
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "upstream")
    monkeypatch.delitem(sys.modules, "expectations", raising=False)
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = "skip_global_cleanup"')
    pytester.makepyfile(test_some=TESTS)

    def run(recorded: str, *arguments: str):
        pytester.path.joinpath("known.toml").write_text(recorded)
        return pytester.runpytest(
            "-p", "expectations", "--expectations", "known.toml", *(arguments or ["."])
        )

    return run


def test_true_list_passes(run):
    run(RECORDED).assert_outcomes(passed=1, xfailed=4, skipped=1)


def test_unlisted_failure_fails(run):
    result = run(RECORDED.replace(', "test_some.py::test_cannot_start" = 1', ""))
    result.assert_outcomes(passed=1, xfailed=3, skipped=1, errors=1)


def test_unlisted_skip_fails(run):
    result = run(RECORDED[: RECORDED.index("[[skips]]")])
    result.assert_outcomes(passed=1, xfailed=4, errors=1)
    result.stdout.fnmatch_lines("*test_skips skips, and known.toml does not say so*no GPU")


def test_listed_failure_that_passes_fails(run, pytester):
    pytester.makepyfile(test_some=TESTS.replace("== 3", "== 1"))
    result = run(RECORDED)
    result.assert_outcomes(passed=1, failed=1, xfailed=3, skipped=1)
    result.stdout.fnmatch_lines("*XPASS(strict)*")


def test_listed_skip_that_passes_fails(run, pytester):
    pytester.makepyfile(test_some=TESTS.replace('@pytest.mark.skip(reason="no GPU")', ""))
    result = run(RECORDED)
    result.assert_outcomes(passed=1, failed=1, xfailed=4)
    result.stdout.fnmatch_lines("*test_skips does not skip; take it out of known.toml")


@pytest.mark.parametrize("skips", [True, False])
def test_a_test_that_may_skip_may_pass_as_well(run, pytester, skips):
    if not skips:
        pytester.makepyfile(test_some=TESTS.replace('@pytest.mark.skip(reason="no GPU")', ""))
    result = run(RECORDED.replace("[[skips]]", "[[may_skip]]"))
    result.assert_outcomes(passed=2 - skips, xfailed=4, skipped=int(skips))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("[*]", "[1]"), "names 1 tests, and not 2"),
        (("= 2", "= 3"), "names 2 tests, and not 3"),
        (("test_skips", "test_gone"), "test_gone names 0 tests, and not 1"),
        (
            ("test_some.py::test_skips", "*"),
            "is named more than once: test_some.py::test_fails",
        ),
        (("skips", "passes"), "passes"),
        (("reason", "because"), "'reason'"),
        (("= 1 }", "= 1"), "Unclosed"),
    ],
)
def test_false_list_is_an_error(run, change, complaint):
    result = run(RECORDED.replace(*change))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(f"*known.toml: *{complaint}*")


@pytest.mark.parametrize("argument", ["test_other.py", "test_some.py::test_passes"])
def test_only_what_is_asked_for_must_be_there(run, pytester, argument):
    pytester.makepyfile(test_other="def test_other(): pass")
    run(RECORDED, argument).assert_outcomes(passed=1)


def test_file_that_is_gone_is_an_error(run, pytester):
    pytester.mkdir("folder").joinpath("test_other.py").write_text("def test_other(): pass")
    result = run(RECORDED.replace("test_some.py", "folder/test_some.py"), "folder")
    assert result.ret == pytest.ExitCode.USAGE_ERROR


SKIPS_AS_A_WHOLE = "import pytest\npytest.skip('no GPU', allow_module_level=True)"


def test_listed_file_may_skip_as_a_whole(run, pytester):
    pytester.makepyfile(test_other=SKIPS_AS_A_WHOLE)
    recorded = RECORDED.replace("test_some.py::test_skips", "test_other.py")
    run(recorded, "test_other.py").assert_outcomes(skipped=1)


def test_unlisted_file_may_not_skip_as_a_whole(run, pytester):
    pytester.makepyfile(test_other=SKIPS_AS_A_WHOLE)
    result = run(RECORDED, "test_other.py")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*test_other.py skips as a whole, and known.toml does not*")
