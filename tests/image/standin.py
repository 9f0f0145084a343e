"""Stand-ins for the official image and for installed releases: no registry is at hand.

A wheel of the release as published, called `vllm` as the official one is; and an image with a
Python of its own that has this wheel installed. What vLLM needs besides (torch and the rest,
gigabytes) is not copied into the image but mounted from the test environment.
"""

import base64
import csv
import hashlib
import io
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from scripts import checkout, series
from scripts.pins import Pin
from scripts.wheel import host_arch

DEPENDENCIES = "/opt/dependencies"  # in the image


def release_wheel(pin: Pin, built: Path, folder: Path, version: str) -> Path:
    """The built wheel without the series.

    And without compiled code: on the torch of the test environment it does not load anyway.
    """
    repository = checkout.open_checkout(pin)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        tree = Path(scratch)
        with zipfile.ZipFile(built) as archive:
            archive.extractall(tree, [n for n in archive.namelist() if not n.endswith(".so")])
        for path, (before, _) in series.net_effect(series.read(pin.series)).items():
            if before is None:
                (tree / path).unlink(missing_ok=True)
            elif path.startswith("vllm/"):
                (tree / path).write_text(repository("show", f"{checkout.BASE}:{path}") + "\n")
        (info,) = tree.glob("*.dist-info")
        info = info.rename(tree / f"vllm-{version}.dist-info")
        _substitute(info / "METADATA", "^Version: .*$", f"Version: {version}")
        _substitute(info / "METADATA", "^Name: .*$", "Name: vllm")
        parts = tuple(map(int, pin.version.split(".")))
        _substitute(
            tree / "vllm/_version.py", "^(__version__ = .* = ).*$", rf"\g<1>{version!r}"
        )
        _substitute(
            tree / "vllm/_version.py", "^(__version_tuple__ = .* = ).*$", rf"\g<1>{parts!r}"
        )
        return _pack(tree, info, folder / f"vllm-{version}-cp38-abi3-linux_{host_arch()}.whl")


def _pack(tree: Path, info: Path, target: Path) -> Path:
    """A wheel without compression: it is unpacked again at once."""
    (info / "RECORD").unlink()
    rows = []
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(tree.rglob("*")):
            if file.is_file():
                path = file.relative_to(tree).as_posix()
                content = file.read_bytes()
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
                rows.append([path, f"sha256={digest.rstrip(b'=').decode()}", str(len(content))])
                archive.writestr(path, content)
        record = f"{info.name}/RECORD"
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, [record, "", ""]])
        archive.writestr(record, text.getvalue())
    return target


def _substitute(file: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, file.read_text(), count=1, flags=re.M)
    assert count == 1, (file, pattern)
    file.write_text(text)


def dependencies(pin: Pin, folder: Path) -> Path:
    """What the test environment of a pin has installed, but for vLLM."""
    (site,) = (pin.environment / "lib").glob("python*/site-packages")
    folder.mkdir()
    for entry in site.iterdir():
        if not entry.name.startswith("vllm"):
            (folder / entry.name).symlink_to(entry)
    return folder


def root_filesystem(folder: Path) -> Path:
    """This machine's Python and shell, with the libraries that they need."""
    prefix, version = Path(sys.base_prefix), f"python{sysconfig.get_python_version()}"
    local = folder / "usr" / "local"
    shutil.copytree(
        prefix / "lib" / version,
        local / "lib" / version,
        ignore=shutil.ignore_patterns(
            "__pycache__",
            "site-packages",
            "dist-packages",
            "test",
            "idlelib",
            "config-*",
            "*.a",
        ),
        symlinks=True,
    )
    (local / "lib" / version / "site-packages").mkdir()
    (local / "bin").mkdir()
    shutil.copy(prefix / "bin" / version, local / "bin" / version)
    (local / "bin" / "python3").symlink_to(version)
    for library in (prefix / "lib").glob("libpython3*.so*"):
        shutil.copy(library, local / "lib")
    for name in ("bin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "run", "etc", "root", "dev/shm", "proc", "sys", DEPENDENCIES[1:]):
        (folder / name).mkdir(parents=True)
    (folder / "tmp").chmod(0o1777)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for name in ("hostname", "hosts", "resolv.conf"):  # a container's own go there
        (folder / "etc" / name).touch()
    return folder
