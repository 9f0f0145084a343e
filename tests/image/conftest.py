"""The installer of the default pin, made from the wheel that `make test` has built."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import standin

from scripts import installer, pins, wheel


@dataclass
class Environment:
    """A virtual environment with a release in it, and the installer beside it."""

    folder: Path
    archive: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    def __call__(self, command: str) -> tuple[int, str]:
        """Run the installer; its exit status, and all that it prints."""
        done = subprocess.run(
            [self.python, self.archive, command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        return done.returncode, done.stdout

    def files(self) -> dict[str, tuple[bytes, int, int]]:
        """Content, mode and time of all that belongs to vLLM."""
        found = {}
        for top in self.site.glob("vllm*"):
            for file in top.rglob("*"):
                status = file.stat()
                content = b"" if file.is_dir() or file.suffix == ".so" else file.read_bytes()
                time = 0 if file.is_dir() else status.st_mtime_ns
                found[str(file.relative_to(self.site))] = (content, status.st_mode, time)
        return found


@pytest.fixture(scope="session")
def pin() -> pins.Pin:
    return pins.load(pins.DEFAULT)


@pytest.fixture(scope="session")
def built(pin) -> Path:
    return wheel.build(pin, "cpu", wheel.host_arch())


@pytest.fixture(scope="session")
def archive(pin, built) -> Path:
    return installer.build(pin, built)


@pytest.fixture(scope="session")
def release_wheel(pin, built, tmp_path_factory) -> Path:
    """A wheel of the release as published."""
    return standin.release_wheel(
        pin, built, tmp_path_factory.mktemp("release"), f"{pin.version}+cpu"
    )


@pytest.fixture(scope="session")
def dependencies(pin, tmp_path_factory) -> Path:
    return standin.dependencies(pin, tmp_path_factory.mktemp("dependencies") / "site")


@pytest.fixture(scope="session")
def make_environment(pin, archive, dependencies, tmp_path_factory):
    """A function that makes a virtual environment with this wheel installed."""

    def make(wheel: Path) -> Environment:
        folder = tmp_path_factory.mktemp("environment") / "venv"
        python = pin.environment / "bin" / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        environment = Environment(folder, archive)
        (environment.site / "dependencies.pth").write_text(f"{dependencies}\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", environment.python, "install", "--quiet",
             "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile", wheel],
            check=True,
        )  # fmt: skip
        return environment

    return make


@pytest.fixture(scope="session")
def buildah() -> str:
    found = shutil.which("buildah")
    if not found:
        pytest.skip("buildah is not installed, so no image was built: apt-get install buildah")
    return found
