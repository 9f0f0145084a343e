"""`make bisect`: what it demands of every single patch."""

import sys
from pathlib import Path

import pytest

from scripts import bisection, checkout, series, testing
from scripts.shell import Failure, run

PASSING = "from vllm.config import SETTING\n\ndef test_setting():\n    assert SETTING == {}\n"


@pytest.fixture
def check(upstream, monkeypatch, capsys):
    """Commit files as one patch and check it, with plain pytest and no lint."""

    def run_tests(pin, python, tests, *arguments, folder, env):
        return run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                    *arguments, *tests], cwd=folder, env=env, check=False)  # fmt: skip

    monkeypatch.setattr(testing, "run_vllm_tests", run_tests)
    monkeypatch.setattr(bisection, "lint", lambda tree, files: None)
    checkout.apply(upstream.load())

    def checked(files: dict[str, str]) -> str:
        for path, content in files.items():
            file = upstream.load().checkout / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        upstream.commit_in_checkout("README.md", "changed\n", "[Bugfix] A patch")
        checkout.export(upstream.load())
        pin = upstream.load()
        repository = checkout.open_checkout(pin)
        ((name, content),) = series.read(pin.series).items()
        with checkout.scratch_worktree(repository, checkout.BASE) as tree:
            bisection.check_patch(
                pin, Path(sys.executable), tree, repository("rev-parse", "HEAD"),
                name, series.touched(content),
            )  # fmt: skip
        return capsys.readouterr().out

    return checked


def test_a_test_that_fails_before_and_passes_after(check):
    files = {"vllm/config.py": "SETTING = 7\n", "tests/test_new.py": PASSING.format(7)}
    assert "1 tests pass, 1 of them not before" in check(files)


def test_a_test_of_a_new_module_fails_before_by_its_import(check):
    test = "import vllm.new\n\ndef test_new():\n    pass\n"
    assert "1 of them not before" in check({"vllm/new.py": "", "tests/test_new.py": test})


def test_a_test_that_passes_without_the_patch_proves_nothing(check):
    files = {"vllm/config.py": "SETTING = 7\n", "tests/test_new.py": "def test():\n    pass\n"}
    with pytest.raises(Failure, match="pass without it, so they prove nothing"):
        check(files)


def test_a_test_that_fails_after_the_patch_is_named(check):
    files = {"vllm/config.py": "SETTING = 7\n", "tests/test_new.py": PASSING.format(8)}
    with pytest.raises(Failure, match="fail after it: tests.test_new::test_setting"):
        check(files)


def test_a_change_of_code_needs_a_test(check):
    with pytest.raises(Failure, match="changes vllm/config.py and has no test"):
        check({"vllm/config.py": "SETTING = 7\n"})


def test_docs_need_no_test(check):
    assert "nothing to test" in check({"docs/page.md": "# A page\n"})


@pytest.mark.parametrize("broken", ["SETTING = 7\n)\n", "SETTING = 7\nimport no_such_module\n"])
def test_a_tree_that_does_not_import_is_named(check, broken):
    files = {"vllm/config.py": broken, "tests/test_new.py": PASSING.format(7)}
    with pytest.raises(Failure, match="config.py|no_such_module"):
        check(files)
