"""Make the installer of a series: one file that changes a vLLM which is installed already.

It is a Python archive (`python FILE check`, `install`, `verify`, `remove`) that needs nothing
but the Python that has vLLM: `image/installer/`, and the files of the built wheel.
"""

import hashlib
import io
import json
import re
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from image.installer.merge import gone, identifiers
from scripts import checkout, series
from scripts.git import Git
from scripts.pins import ROOT, Pin
from scripts.shell import Failure, say

_PROGRAM = ROOT / "image" / "installer"


def installer_path(pin: Pin) -> Path:
    return pin.dist / f"vllm-{pin.full_version}-installer.pyz"


def build(pin: Pin, wheel: Path) -> Path:
    """Make the archive from a built wheel; the same bytes for the same wheel and program.

    Raises:
        Failure: the checkout does not hold the series, or the wheel another one.
    """
    repository = checkout.require_series(pin)
    patches = series.read(pin.series)
    effect = {p: ids for p, ids in series.net_effect(patches).items() if p.startswith("vllm/")}
    release = _python_files(repository, checkout.BASE)
    after = _from_wheel(wheel, effect)
    before = {path: release[path] for path, (blob, _) in effect.items() if blob}
    contents = {
        "pin": pin.tag,
        "release": pin.version,
        "local_version": pin.local_version,
        "series": hashlib.sha256(b"".join(patches.values())).hexdigest(),
        "project_revision": revision(pin),
        "patches": list(_parts(patches, before, after)),
        "files": {
            path: [_sha256(side[path]) if path in side else None for side in (before, after)]
            for path in sorted(effect)
        },
        "gone": sorted(
            set().union(
                *(
                    gone(before[path].decode(), after[path].decode())
                    for path in before.keys() & after.keys()
                )
            )
        ),
        "release_files": {path: _sha256(content) for path, content in sorted(release.items())},
    }
    members = {path.name: path.read_bytes() for path in sorted(_PROGRAM.glob("*.py"))}
    members["manifest.json"] = json.dumps(contents, indent=1).encode()
    for folder, contents in (("before", before), ("after", after)):
        members |= {f"{folder}/{path}": contents[path] for path in sorted(contents)}
    target = installer_path(pin)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(_archive(members, pin.released))
    target.chmod(0o755)
    content = target.read_bytes()
    say(f"{pin.tag}: {target}\n  {len(content)} bytes, sha256 {_sha256(content)}")
    return target


def manifest(archive: Path) -> dict:
    with zipfile.ZipFile(archive) as members:
        return json.loads(members.read("manifest.json"))


def revision(pin: Pin) -> str:
    """The project's commit, marked if there are edits; nothing outside of git."""
    repository = Git(pin.root)
    head = repository.find("HEAD")
    if not head:
        return "unknown"
    return head + ("-edited" if repository("status", "--porcelain", "patches", "image") else "")


def _python_files(repository: Git, commit: str) -> dict[str, bytes]:
    listing = repository("ls-tree", "-r", "--name-only", commit, "vllm").splitlines()
    archive = repository.folder.parent / f".release-{repository.folder.name}.tar"
    try:
        repository("archive", "--output", archive, commit, "vllm")
        with tarfile.open(archive) as tar:
            found = {
                member.name: tar.extractfile(member).read()
                for member in tar
                if member.isfile() and member.name.endswith(".py")
            }
    finally:
        archive.unlink(missing_ok=True)
    if missing := {path for path in listing if path.endswith(".py")} - found.keys():
        raise Failure(f"not in the archive of the release: {', '.join(sorted(missing))}")
    return found


def _from_wheel(wheel: Path, effect: dict) -> dict[str, bytes]:
    found = {}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path, (_, blob) in effect.items():
            content = archive.read(path) if path in names else None
            if (content and _blob_id(content)) != blob:
                raise Failure(f"{wheel.name} has another {path} than the series: build it anew")
            if content is not None:
                found[path] = content
    return found


def _parts(
    patches: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]
) -> Iterator[dict]:
    """Each patch, its files in the package, and whether the others can do without it."""
    files = {
        name: {file.path for file in series.touched(content) if file.path.startswith("vllm/")}
        for name, content in patches.items()
    }
    for name, content in patches.items():
        rest = set().union(*(paths for other, paths in files.items() if other != name))
        alone = bool(files[name]) and not files[name] & rest and files[name] <= before.keys()
        separable = alone and not _new_names(files[name], before, after) & _new_names(
            rest, before, after
        )
        yield {
            "subject": _subject(content),
            "files": sorted(files[name]),
            "separable": separable,
        }


def _new_names(paths: set[str], before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    """The names that these files use or define now, and did not."""
    sides = [
        set().union(*(identifiers(side[path].decode()) for path in paths if path in side))
        for side in (before, after)
    ]
    return sides[1] - sides[0]


def _subject(content: bytes) -> str:
    header = content.partition(b"\n\n")[0].decode()
    subject = re.search(r"^Subject: (.*(?:\n .*)*)", header, re.M)
    return " ".join(subject[1].split()) if subject else "?"


def _archive(members: dict[str, bytes], released: int) -> bytes:
    output = io.BytesIO(b"#!/usr/bin/env python3\n")
    output.seek(0, io.SEEK_END)
    with zipfile.ZipFile(output, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name, time.gmtime(released)[:6])
            info.external_attr = 0o644 << 16
            archive.writestr(info, content, zipfile.ZIP_DEFLATED)
    return output.getvalue()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
