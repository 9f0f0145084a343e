"""Run vLLM's own pre-commit hooks on the files that a series touches.

vLLM's configuration in the checkout decides hooks, versions and arguments. Hooks that it
takes from other repositories are installed from the package registries instead, at the
revision it names, so that nothing but those registries has to be reachable.
"""

import sys
from pathlib import Path

import yaml

from scripts.git import Git
from scripts.pins import ROOT
from scripts.shell import Failure, everything, run

# Repository -> (language, package, hook id -> command that reports and changes nothing).
_PACKAGED = {
    "https://github.com/astral-sh/ruff-pre-commit": (
        "python",
        "ruff=={version}",
        {
            "ruff-check": "ruff check --force-exclude",
            "ruff-format": "ruff format --force-exclude --diff",
        },
    ),
    "https://github.com/crate-ci/typos": (
        "python",
        "typos=={version}",
        {"typos": "typos --force-exclude"},
    ),
    "https://github.com/DavidAnson/markdownlint-cli2": (
        "node",
        "markdownlint-cli2@{version}",
        {"markdownlint-cli2": "markdownlint-cli2"},
    ),
}
# Hooks for what a series never touches (C++, shell, lock files, images, Rust), and those
# that act on the commit being made.
_LEFT_OUT = {
    "actionlint", "attention-backend-docs", "check-dockerignore-tracked", "check-json",
    "clang-format", "format-torch-nightly-test", "pip-compile", "png-lint",
    "rust-cargo-autoinherit", "rust-cargo-fmt", "rust-cargo-sort", "shellcheck",
    "signoff-commit", "suggestion", "test-nonroot-entrypoint", "update-dockerfile-graph",
    "validate-docker-versions",
}  # fmt: skip
_TYPES = {
    "ruff-check": ["python", "pyi"],
    "ruff-format": ["python", "pyi"],
    "typos": ["text"],
    "markdownlint-cli2": ["markdown"],
}


def lint(worktree: Git, files: list[str]) -> None:
    """Check `files` of a working tree.

    Raises:
        Failure: a hook complains, or vLLM has a hook that this module does not know.
    """
    present = [file for file in files if (worktree.folder / file).is_file()]
    if not present:
        return
    config = worktree.path("hooks.yaml")
    original = yaml.safe_load((worktree.folder / ".pre-commit-config.yaml").read_text())
    config.write_text(yaml.safe_dump(_derive(original), sort_keys=False))
    done = run_pre_commit(worktree.folder, "--config", config, "--files", *present)
    if done.returncode:
        raise Failure(f"vLLM's lint complains:\n{everything(done)}")


def run_pre_commit(folder: Path, *arguments: str | Path):
    """`pre-commit run` in `folder`, with its environments under build/."""
    return run(
        [sys.executable, "-m", "pre_commit", "run", "--color=never", *arguments],
        cwd=folder,
        env={"PRE_COMMIT_HOME": str(ROOT / "build" / "pre-commit")},
        check=False,
    )


def _derive(original: dict) -> dict:
    hooks = []
    for repo in original["repos"]:
        for hook in repo["hooks"]:
            if hook["id"] in _LEFT_OUT or "manual" in hook.get("stages", []):
                continue
            hooks.append(hook if repo["repo"] == "local" else _from_package(repo, hook))
    return {
        "exclude": original.get("exclude", "^$"),
        "repos": [{"repo": "local", "hooks": hooks}],
    }


def _from_package(repo: dict, hook: dict) -> dict:
    language, package, commands = _PACKAGED.get(repo["repo"], ("", "", {}))
    if hook["id"] not in commands:
        raise Failure(
            f"vLLM's lint has a hook that is not known here: {hook['id']} of "
            f"{repo['repo']}. Add it to scripts/upstream_lint.py."
        )
    # `args` of these hooks only choose to fix files or how to print.
    settings = [a for a in hook.get("args", []) if a.startswith("--config") or "/" in a]
    return {
        "id": hook["id"],
        "name": hook["id"],
        "entry": commands[hook["id"]],
        "args": settings,
        "language": language,
        "types_or": _TYPES[hook["id"]],
        "exclude": hook.get("exclude", "^$"),
        "additional_dependencies": [package.format(version=repo["rev"].lstrip("v"))],
    }
