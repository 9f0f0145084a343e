"""The pinned release without the series, for the tests that show that the bed bites."""

import os
import shutil
import subprocess
from pathlib import Path

import vllm

_ROOT = Path(__file__).parents[2]
_BASE, _SERIES = "refs/series/base", "refs/series/head"


def stock_path(tag: str, scratch: Path) -> Path:
    """A folder for `PYTHONPATH` in which `vllm` is the release as published.

    That is the folder named by `STOCK_VLLM`, or else the installed package with the files
    that the series touches taken from the base commit of the checkout of `make apply`.
    """
    if chosen := os.environ.get("STOCK_VLLM"):
        return Path(chosen)
    checkout = _ROOT / "build" / "src" / tag
    if not checkout.is_dir():
        raise FileNotFoundError(
            f"{checkout} is missing: run `make apply PIN={tag}`, or name a folder with the "
            "published vllm package in STOCK_VLLM"
        )
    installed = Path(vllm.__file__).parent
    shutil.copytree(
        installed,
        scratch / "vllm",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    changed = _git(checkout, "diff", "--name-only", "--no-renames", _BASE, _SERIES, "vllm")
    for name in changed.decode().splitlines():
        path = scratch / name
        path.unlink(missing_ok=True)
        if _git(checkout, "ls-tree", _BASE, name):
            path.write_bytes(_git(checkout, "show", f"{_BASE}:{name}"))
    return scratch


def _git(checkout: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", checkout, *arguments], check=True, capture_output=True
    ).stdout
