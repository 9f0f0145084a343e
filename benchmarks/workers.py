"""Processes that run `benchmarks.inside` on some tree of vLLM."""

import io
import json
import os
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_BUILD = ROOT / "build"
# A tree's own versions of these would not find the wheel's compiled code.
_KEEP = ("_version.py", "platforms/__init__.py")
STOCK = "stock"


class BenchmarkError(Exception):
    """Something the user should know about; the message says what to do next."""


def environment_python(pin: str) -> Path:
    python = _BUILD / "env" / pin / "bin" / "python"
    if not python.is_file():
        raise BenchmarkError(f"{python} is missing: run `make test PIN={pin}` once to make it")
    return python


def python_path(pin: str, tree: str | None) -> list[Path]:
    """Folders for PYTHONPATH that put a tree of vLLM in the place of the installed one.

    Args:
        pin: the release that the tree belongs to.
        tree: a folder with a `vllm` package of the release, `stock` for the release as
            published, or None for the installed wheel.
    """
    if tree is None:
        return []
    if tree == STOCK:
        name, source = f"{pin}-stock", _published(pin)
    else:
        source = Path(tree).resolve()
        name = f"{pin}-{source.name}-{zlib.crc32(bytes(source)):08x}"
    if not (source / "vllm" / "__init__.py").is_file():
        raise BenchmarkError(f"{source} holds no vllm package; name a checkout of vLLM {pin}")
    return [_overlay(_installed(pin), source / "vllm", _BUILD / "bench" / name)]


def _published(pin: str) -> Path:
    """The package of the release as published, from the base commit of the checkout."""
    checkout = _BUILD / "src" / pin
    if not checkout.is_dir():
        raise BenchmarkError(f"{checkout} is missing: run `make apply PIN={pin}`")
    folder = _BUILD / "bench" / f"{pin}-published"
    if not (folder / "complete").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(
            ["git", "-C", checkout, "archive", "refs/series/base", "vllm"],
            check=True,
            capture_output=True,
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        (folder / "complete").touch()
    return folder


def _installed(pin: str) -> Path:
    [package] = (_BUILD / "env" / pin / "lib").glob("python3*/site-packages/vllm")
    return package


def _overlay(installed: Path, tree: Path, folder: Path) -> Path:
    """A package of links: the tree's files, and the wheel's where the tree has none."""
    wanted = {
        path.relative_to(package): path
        for package in (installed, tree)
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in map(Path, _KEEP):
        wanted[name] = installed / name
    package = folder / "vllm"
    for link in package.rglob("*") if package.is_dir() else ():
        if link.is_symlink() and link.relative_to(package) not in wanted:
            link.unlink()
    for name, path in wanted.items():
        link = package / name
        if link.is_symlink() and link.readlink() == path:
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return folder


class Worker:
    """One process, on one tree of vLLM."""

    def __init__(self, pin: str, tree: str | None = None) -> None:
        path = [*python_path(pin, tree), ROOT]
        self._process = subprocess.Popen(
            [environment_python(pin), "-m", "benchmarks.inside"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, path)),
                # Sets of block hashes in one order every time.
                "PYTHONHASHSEED": "0",
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(_BUILD / "bench" / "vllm-cache"),
            },
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            text=True,
        )

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function of `benchmarks.inside` and wait for its result.

        Raises:
            BenchmarkError: it raised an exception, or the process has died.
        """
        pipes = self._process
        try:
            pipes.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            pipes.stdin.flush()
            line = pipes.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(f"the process for {name} has died; see above")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"{name}({arguments}):\n{answer['error']}")
        return answer["result"]

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
