"""A tiny upstream with a series of fixes, for the tests of `drift` and `submit`."""

import json
from pathlib import Path

from conftest import TAG, Upstream, git

from scripts import checkout

TEMPLATE = """\
<!-- markdownlint-disable -->

## Overview

<!-- What. -->

## Claims

## Validation

## Details

- [ ] AI assistance was used during the creation of this PR.
"""
PAGE = """\
# {title}

## Symptom

It is {name}.

## Root cause

A cause.

## Request flow

1. A request.

## Fix

- A cure.

## Evidence

`test_{name}`.

## Limits

None.
"""
BODY = "Symptom, root cause and cure, in plain words. " * 6


def message(subject: str) -> str:
    lines = [BODY[start : start + 92].strip() for start in range(0, len(BODY), 92)]
    return "\n".join([subject, "", *lines, "", "Assisted-by: AI coding agent"])


def write_table(upstream: Upstream, entries: dict[str, dict]) -> None:
    """Write `fixes.toml` and a page for each entry; values are those of the pin's."""
    text = ""
    for name, entry in entries.items():
        text += f'[{name}]\ntitle = "Fix of {name}"\nsearches = ["{name} words"]\n'
        text += f'[{name}."{TAG}"]\n'
        text += "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
        page = upstream.root / "docs" / "fixes" / f"{name}.md"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(PAGE.format(title=f"Fix of {name}", name=name))
    (upstream.root / "upstream" / "fixes.toml").write_text(text)


def release(upstream: Upstream, files: dict[str, str]) -> None:
    """Put more files into the release."""
    git(upstream.repository, "checkout", "--quiet", TAG)
    for name, content in files.items():
        path = upstream.repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    git(upstream.repository, "add", "--all", "--force")
    git(upstream.repository, "commit", "--quiet", "--message", "Release")
    git(upstream.repository, "tag", "--force", "--annotate", "--message", "release", TAG)
    commit = git(upstream.repository, "rev-parse", "HEAD")
    upstream.edit_pin(upstream.commit, commit)
    upstream.let_repository_answer()


def commit_patch(upstream: Upstream, subject: str, files: dict[str, str]) -> None:
    folder = upstream.load().checkout
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message(subject))


def engine(changes: dict[int, str]) -> str:
    """The tiny vLLM's `engine.py` with some lines changed."""
    return "".join(f"{changes.get(n, f'line_{n} = {n}')}\n" for n in range(40))


def make_series(upstream: Upstream) -> None:
    """Three patches: two on the same lines, one in a file of its own; the table of them."""
    checkout.apply(upstream.load())
    first = {5: "first_change_of_line_5 = True"}
    commit_patch(
        upstream,
        "[Bugfix][Core] First",
        {"vllm/engine.py": engine(first), "tests/test_first.py": "def test_first(): ...\n"},
    )
    second = {5: "second_change_of_line_5 = True"}
    commit_patch(
        upstream,
        "[Bugfix][Core] Second",
        {"vllm/engine.py": engine(second), "tests/test_second.py": "def test_second(): ...\n"},
    )
    commit_patch(
        upstream,
        "[Feature] Third",
        {
            "vllm/third.py": "third_has_come = True\n",
            "tests/test_third.py": "def test_x(): ...\n",
        },
    )
    checkout.export(upstream.load())
    write_table(
        upstream,
        {
            "both": {
                "state": "pending",
                "patches": ["[Bugfix][Core] First", "[Bugfix][Core] Second"],
            },
            "third": {"state": "pending", "patches": ["[Feature] Third"]},
            "elsewhere": {"state": "not needed", "note": "engine.py does it"},
            "planned": {"state": "pending", "patches": []},
        },
    )


def copy_release(upstream: Upstream, folder: Path, files: dict[str, str | None]) -> Path:
    """A newer source: the release with some files changed, or gone."""
    folder.mkdir()
    archive = git(upstream.repository, "ls-tree", "-r", "--name-only", TAG).split()
    for name in archive:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(git(upstream.repository, "show", f"{TAG}:{name}") + "\n")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(content)
    return folder
