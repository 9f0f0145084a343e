"""`make test`: everything that the project promises, without a GPU."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from scripts import checkout, environment, series, wheel
from scripts.pins import ROOT, Pin
from scripts.shell import Failure, run, say

_TESTS = ROOT / "tests"
# Some tests inside the patches start an engine; on the CPU it wants these. A GPU is hidden,
# so that what cannot pass without one is the same everywhere.
_ENGINE_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def test(pins: list[Pin]) -> None:
    """Run all tests, the fast ones first.

    Raises:
        Failure: at the first group of tests that does not pass.
    """
    _pytest("this project's scripts", sys.executable, "machinery")
    _pytest("the live check", sys.executable, "server")
    pythons = {}
    for pin in pins:
        checkout.apply(pin)
        pythons[pin.tag] = environment.ensure(pin, wheel.build(pin, "cpu", wheel.host_arch()))
    _pytest("the installer and the image", sys.executable, "image")
    for pin in pins:
        _pytest(f"{pin.tag}: benchmarks", pythons[pin.tag], "benchmarks")
        _pytest(f"{pin.tag}: sizes and deployment", pythons[pin.tag], "deploy")
    for pin in pins:
        tests = sorted({*pin.upstream_tests, *own_tests(pin)})
        what = f"{pin.tag}: vLLM's tests, the series' own among them"
        say(f"\n{what}")
        folder = copy_vllm_tests(pin)
        _expect_success(
            what, run_vllm_tests(pin, pythons[pin.tag], tests, folder=folder, capture=False)
        )
    for pin in pins:
        _pytest(f"{pin.tag}: histories", pythons[pin.tag], "histories")
    for pin in pins:
        _pytest(f"{pin.tag}: the engine", pythons[pin.tag], "engine")


def own_tests(pin: Pin) -> list[str]:
    """The test files that the series adds or changes."""
    effect = series.net_effect(series.read(pin.series))
    return sorted(path for path, (_, after) in effect.items() if after and is_test(path))


def is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_")


def copy_vllm_tests(pin: Pin) -> Path:
    """Copy the checkout's tests away from its `vllm`, which would hide the installed one."""
    folder = pin.root / "build" / "vllm-tests" / pin.tag
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / "tests.tar"
    repository = checkout.require_series(pin)
    repository("archive", "--output", archive, "HEAD", "tests", "pyproject.toml")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    return folder


def run_vllm_tests(
    pin: Pin,
    python: Path,
    tests: list[str],
    *arguments: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run tests of vLLM's, `folder` being where its `tests/` is.

    Models that they name are found as folders there; tests that need a GPU must be the
    recorded ones.
    """
    env = dict(env or {})
    run([python, _TESTS / "upstream" / "stub_models.py", folder])
    path = [
        _TESTS / "upstream",
        _TESTS / "engine" / "plugins",
        *filter(None, [env.get("PYTHONPATH")]),
    ]
    return run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "expectations",
         "--disable-warnings", "--timeout=600",
         f"--expectations={_TESTS / 'upstream' / 'known' / pin.tag}.toml",
         *arguments, *tests],
        cwd=folder,
        env={
            **env,
            **_ENGINE_ENVIRONMENT,
            "PYTHONPATH": ":".join(map(str, path)),
            "VLLM_CACHE_ROOT": str(pin.environment / "vllm-cache"),
        },
        check=False,
        capture=capture,
    )  # fmt: skip


def _pytest(what: str, python: str | Path, folder: str) -> None:
    say(f"\n{what}")
    command = [python, "-m", "pytest", "-q", "-rs", "--disable-warnings", _TESTS / folder]
    _expect_success(what, run(command, cwd=ROOT, check=False, capture=False))


def _expect_success(what: str, done: subprocess.CompletedProcess[str]) -> None:
    # No word on success: pytest's own summary is to be the last line.
    if done.returncode:
        raise Failure(f"{what}: tests failed")
