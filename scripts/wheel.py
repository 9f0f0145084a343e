"""Build the patched wheel: by repacking the published one, or by vLLM's own build.

Only Python changes, so the published wheel's compiled code is the right one for the
patched tree; what that claim rests on is checked here each time.
"""

import base64
import csv
import hashlib
import io
import json
import platform
import re
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

from scripts import series
from scripts.checkout import require_series
from scripts.downloads import fetch
from scripts.git import Git
from scripts.pins import Pin, Wheel
from scripts.shell import Failure, everything, run, say

# Paths on whose account vLLM itself does not reuse published binaries, and dependencies.
_COMPILED = ("csrc/", "cmake/", "CMakeLists.txt", "rust/", "setup.py", "vllm/_custom_ops.py")
_DEPENDENCIES = ("pyproject.toml", "requirements/")
_VERSION_FILE = "vllm/_version.py"


def host_arch() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def wheel_path(pin: Pin, variant: str, arch: str) -> Path:
    """Where `build` puts this wheel."""
    name, _, _, tags = parse_wheel_filename(pin.wheel(variant, arch).artefact.file)
    (tag,) = tags
    return pin.dist / f"{name.replace('-', '_')}-{pin.full_version}-{tag}.whl"


def build(pin: Pin, variant: str, arch: str) -> Path:
    """Repack the published wheel with the series' Python files.

    Returns:
        The wheel, the same bytes for the same pin, series and scripts.

    Raises:
        Failure: the checkout does not hold the series, the series touches more than
            Python, or a file is not what it should be.
    """
    wheel = pin.wheel(variant, arch)
    repository = require_series(pin)
    patches = series.read(pin.series)
    effect = series.net_effect(patches)
    _refuse_compiled(pin, effect)

    target = wheel_path(pin, variant, arch)
    stamp = target.with_suffix(".inputs.json")
    inputs = json.dumps(
        {
            "published": wheel.artefact.sha256,
            "kept": sorted(wheel.keep),
            "tree": repository.tree("HEAD"),
            "version": pin.full_version,
            "recipe": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        }
    )
    if target.is_file() and stamp.is_file() and stamp.read_text() == inputs + _sha256(target):
        say(f"{pin.tag}: {target} is up to date")
        return target

    published = fetch(wheel.artefact)
    target.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as scratch:
        say(f"{pin.tag}: repacking {published.name}")
        _wheel("unpack", published, "--dest", scratch)
        (tree,) = Path(scratch).iterdir()
        if not wheel.whole_package:
            _check_published(tree, effect)
        taken = _take_python(repository, wheel, tree, effect)
        _rename(pin, tree, published.name)
        packed = Path(scratch) / "packed"
        packed.mkdir()
        _wheel("pack", tree, "--dest-dir", packed, epoch=pin.released)
        (result,) = packed.iterdir()
        _check_result(published, result, wheel, taken, effect)
        result.replace(target)
    digest = _sha256(target)
    stamp.write_text(inputs + digest)
    say(f"{pin.tag}: {target}\n  {target.stat().st_size} bytes, sha256 {digest}")
    return target


def build_from_source(pin: Pin, variant: str, python: str) -> None:
    """Run vLLM's own build in the checkout, with an interpreter of the user's.

    Raises:
        Failure: something the build needs is missing; the message names all of it.
    """
    repository = require_series(pin)
    target = {"cuda": "cuda", "cpu": "cpu"}[variant]
    probe = run([python, Path(__file__).with_name("source_build_needs.py"),
                 pin.checkout, target], check=False)  # fmt: skip
    if probe.returncode:
        raise Failure(
            f"{python} cannot build vLLM {pin.version} for {target}:\n"
            f"{everything(probe)}\nInstall these, or name another interpreter with "
            "SOURCE_PYTHON=. `make build` without SOURCE=1 compiles nothing."
        )
    pin.dist.mkdir(parents=True, exist_ok=True)
    run(
        [python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--verbose",
         "--wheel-dir", pin.dist, repository.folder],
        env={
            "VLLM_TARGET_DEVICE": target,
            # The checkout has no tags for setuptools-scm to read the version from.
            "SETUPTOOLS_SCM_PRETEND_VERSION": pin.full_version,
            "VLLM_VERSION_OVERRIDE": pin.full_version,
        },
        capture=False,
    )  # fmt: skip
    say(f"{pin.tag}: built from source into {pin.dist}")


def _refuse_compiled(pin: Pin, effect: dict) -> None:
    for kind, prefixes in (("compiled code", _COMPILED), ("dependencies", _DEPENDENCIES)):
        if found := sorted(path for path in effect if path.startswith(prefixes)):
            raise Failure(
                f"the series of {pin.tag} touches {kind} ({', '.join(found)}), which the "
                "published wheel cannot carry; build with SOURCE=1"
            )


def _check_published(tree: Path, effect: dict) -> None:
    """The wheel must hold the very files that the series was written against."""
    for path, (before, _) in effect.items():
        if path.startswith("vllm/"):
            file = tree / path
            found = _blob_id(file) if file.is_file() else None
            if found != before:
                raise Failure(
                    f"{path} in the published wheel is blob {found}, the series was made "
                    f"for {before}: this wheel does not belong to the pin's source"
                )


def _take_python(repository: Git, wheel: Wheel, tree: Path, effect: dict) -> set[str]:
    """Put the checkout's files into the unpacked wheel; return their paths."""
    if wheel.whole_package:
        for file in (tree / "vllm").rglob("*"):
            path = file.relative_to(tree).as_posix()
            if file.is_file() and not _stays(path, wheel) and path != _VERSION_FILE:
                file.unlink()
        wanted = ["vllm"]
    else:
        for path, (_, after) in effect.items():
            if path.startswith("vllm/") and after is None:
                (tree / path).unlink()
        wanted = sorted(p for p, (_, a) in effect.items() if p.startswith("vllm/") and a)
    if not wanted:
        return set()
    archive = tree.with_suffix(".tar")
    repository("-c", "tar.umask=0022", "archive", "--output", archive, "HEAD", *wanted)
    with tarfile.open(archive) as tar:
        members = [m for m in tar if m.isfile() and not _stays(m.name, wheel)]
        tar.extractall(tree, members, filter="data")
    archive.unlink()
    taken = {member.name for member in members}
    # Attributes may keep files out of an archive, or change them on the way.
    for path in set(wanted) - {"vllm"}:
        if path not in taken or _blob_id(tree / path) != effect[path][1]:
            raise Failure(f"{path} did not reach the wheel as the series has it")
    return taken


def _stays(path: str, wheel: Wheel) -> bool:
    return wheel.whole_package and (path.endswith(".so") or path in wheel.keep)


def _rename(pin: Pin, tree: Path, published_name: str) -> None:
    """Give the unpacked wheel its version, and the tag of its published file name.

    The published wheels say `linux` inside where their file names say `manylinux`.
    """
    name, _, _, tags = parse_wheel_filename(published_name)
    (old,) = tree.glob("*.dist-info")
    info = old.rename(tree / f"{name.replace('-', '_')}-{pin.full_version}.dist-info")
    (tag,) = tags
    _substitute(info / "METADATA", r"^Version: .*$", f"Version: {pin.full_version}")
    _substitute(info / "WHEEL", r"^Tag: .*$", f"Tag: {tag}")
    parts = (*map(int, pin.version.split(".")), pin.local_version)
    _substitute(tree / _VERSION_FILE, r"^(__version__ = version = ).*$",
                rf"\g<1>{pin.full_version!r}")  # fmt: skip
    _substitute(tree / _VERSION_FILE, r"^(__version_tuple__ = version_tuple = ).*$",
                rf"\g<1>{parts!r}")  # fmt: skip


def _check_result(
    published: Path, result: Path, wheel: Wheel, taken: set[str], effect: dict
) -> None:
    """Every member is as published, from the checkout, or metadata; else say which.

    Raises:
        Failure: a member is missing, unexpected, or has the wrong content or mode.
    """
    old, new = _members(published), _members(result)
    metadata = {p for p in new if ".dist-info/" in p} | {_VERSION_FILE}
    renamed = {re.sub(r"^[^/]+\.dist-info/", "*.dist-info/", p): p for p in old}
    wrong = []
    for path in sorted(new):
        origin = renamed.get(re.sub(r"^[^/]+\.dist-info/", "*.dist-info/", path))
        if path in metadata:
            if origin is None:
                wrong.append(f"{path} is new")
        elif path in taken:
            same_release = origin and not wheel.whole_package
            if same_release and old[origin][1] != new[path][1]:
                wrong.append(f"{path} has another mode than published")
        elif origin is None or old[origin] != new[path]:
            wrong.append(f"{path} is neither as published nor the series' doing")
    for path in sorted(old.keys() - new.keys()):
        removed = path in effect and effect[path][1] is None
        replaced = wheel.whole_package and not _stays(path, wheel)
        if not (removed or replaced or ".dist-info/" in path):
            wrong.append(f"{path} is missing")
    if missing := sorted(taken - new.keys()):
        wrong.append(f"not packed: {', '.join(missing)}")
    if wrong:
        raise Failure(f"{result.name} is not what it should be:\n" + "\n".join(wrong))


def _members(path: Path) -> dict[str, tuple[str, int]]:
    """SHA-256 and mode of every member, with RECORD checked against the content."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        record_name = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(archive.read(record_name).decode()))
        record = {row[0]: row[1] for row in rows}
        for info in archive.infolist():
            if info.is_dir():
                continue
            with archive.open(info) as member:
                digest = hashlib.file_digest(member, "sha256")
            found[info.filename] = (digest.hexdigest(), info.external_attr >> 16)
            encoded = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
            if (
                info.filename != record_name
                and record.get(info.filename) != f"sha256={encoded}"
            ):
                raise Failure(f"{path.name}: RECORD is wrong about {info.filename}")
    return found


def _substitute(file: Path, pattern: str, replacement: str) -> None:
    """Replace the one line of a file, or of a metadata file's header, that matches."""
    head, blank, body = file.read_text(), "", ""
    if file.parent.suffix == ".dist-info":
        head, blank, body = head.partition("\n\n")
    head, count = re.subn(pattern, replacement, head, flags=re.M)
    if count != 1:
        raise Failure(f"{file.name}: expected one line like {pattern!r}, found {count}")
    file.write_text(head + blank + body)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _blob_id(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _wheel(*arguments: str | Path, epoch: int | None = None) -> None:
    env = {} if epoch is None else {"SOURCE_DATE_EPOCH": str(epoch)}
    run([sys.executable, "-m", "wheel", *arguments], env=env)
