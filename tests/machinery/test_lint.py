"""vLLM's lint hooks, taken from the checkout's own configuration."""

import pytest
import yaml
from conftest import git

from scripts import upstream_lint
from scripts.git import Git
from scripts.shell import Failure

RUFF = {
    "repo": "https://github.com/astral-sh/ruff-pre-commit",
    "rev": "v0.14.0",
    "hooks": [
        {"id": "ruff-check", "args": ["--output-format", "github", "--fix"]},
        {"id": "ruff-format"},
    ],
}


def derive(*repositories):
    (local,) = upstream_lint._derive({"repos": list(repositories)})["repos"]
    return {hook["id"]: hook for hook in local["hooks"]}


def test_packaged_hooks_keep_their_version_and_change_nothing():
    hooks = derive(RUFF)
    assert hooks["ruff-check"]["additional_dependencies"] == ["ruff==0.14.0"]
    assert hooks["ruff-check"]["entry"] == "ruff check --force-exclude"
    assert hooks["ruff-check"]["args"] == []
    assert hooks["ruff-format"]["entry"].endswith("--diff")


def test_arguments_that_name_a_configuration_survive():
    markdown = {
        "repo": "https://github.com/DavidAnson/markdownlint-cli2",
        "rev": "v0.21.0",
        "hooks": [{"id": "markdownlint-cli2", "args": ["--config", "tools/x.yaml", "--fix"]}],
    }
    hook = derive(markdown)["markdownlint-cli2"]
    assert hook["args"] == ["--config", "tools/x.yaml"]
    assert hook["additional_dependencies"] == ["markdownlint-cli2@0.21.0"]


def test_local_hooks_are_taken_as_they_are_unless_they_do_not_concern_a_series():
    check = {"id": "check-spdx-header", "language": "python", "entry": "python check.py"}
    local = {"repo": "local", "hooks": [check, {"id": "signoff-commit"}, {"id": "mypy-3.12",
             "stages": ["manual"]}]}  # fmt: skip
    assert derive(local) == {"check-spdx-header": check}


def test_a_hook_that_is_not_known_is_an_error():
    new = {"repo": "https://github.com/somebody/new", "rev": "v1", "hooks": [{"id": "new"}]}
    with pytest.raises(Failure, match="a hook that is not known here: new of https"):
        derive(new)


@pytest.mark.parametrize("content", ["fine\n", "BAD\n"])
def test_a_complaint_is_shown(tmp_path, content):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file.py").write_text(content)
    hook = {"id": "grep", "name": "grep", "language": "pygrep", "entry": "BAD"}
    config = {"repos": [{"repo": "local", "hooks": [hook]}]}
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "x")
    files = ["file.py", "removed.py"]
    if content == "BAD\n":
        with pytest.raises(Failure, match="vLLM's lint complains:(?s:.*)file.py:1:BAD"):
            upstream_lint.lint(Git(tmp_path), files)
    else:
        upstream_lint.lint(Git(tmp_path), files)
    assert git(tmp_path, "status", "--porcelain") == ""
