"""The test environment of a pin: a virtual environment under build/env."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from scripts.pins import Pin
from scripts.shell import Failure, run, say


def ensure(pin: Pin, wheel: Path) -> Path:
    """Return the environment's Python, with this very wheel installed.

    `TORCH_INDEX`, if set, is one more package index, for builds of torch without CUDA.

    Raises:
        Failure: an installation fails.
    """
    python = pin.environment / "bin" / "python"
    requirements = pin.root / "upstream" / "env" / f"{pin.tag}.txt"
    unneeded = requirements.with_suffix(".nodeps.txt")
    lists = [path for path in (requirements, unneeded) if path.is_file()]
    made_from = hashlib.sha256(
        b"".join(path.read_bytes() for path in lists) + sys.version.encode()
    ).hexdigest()
    if _read(pin.environment / "made-from") != made_from:
        say(f"{pin.tag}: making the test environment")
        shutil.rmtree(pin.environment, ignore_errors=True)
        run([sys.executable, "-m", "venv", pin.environment])
        extra = ["--extra-index-url", i] if (i := os.environ.get("TORCH_INDEX")) else []
        _pip(python, *extra, "--requirement", requirements)
        if unneeded in lists:
            _pip(python, "--no-deps", "--requirement", unneeded)
        (pin.environment / "made-from").write_text(made_from)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if _read(pin.environment / "wheel") != digest:
        say(f"{pin.tag}: installing {wheel.name}")
        (pin.environment / "wheel").unlink(missing_ok=True)
        _pip(python, "--no-deps", "--force-reinstall", wheel)
        (pin.environment / "wheel").write_text(digest)
    return python


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _pip(python: Path, *arguments: str | Path) -> None:
    # Warnings about unreachable mirrors and the like go to the output only on failure.
    try:
        run([python, "-m", "pip", "install", "--quiet", *arguments])
    except Failure as error:
        raise Failure(
            f"{error}\nThe test environment could not be made. Run the command again; with "
            "a package index of your own, set PIP_INDEX_URL."
        ) from None
