"""Fetch pinned files from the package index, once, by SHA-256."""

import hashlib
import os
from pathlib import Path

import requests
from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple, tqdm_progress_factory
from pypi_simple.errors import NoSuchProjectError

from scripts.pins import Artefact
from scripts.shell import Failure, say


def cache_folder() -> Path:
    """`GEMMA4KV_CACHE`, or a folder in the user's cache."""
    if chosen := os.environ.get("GEMMA4KV_CACHE"):
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gemma4kv"


def fetch(artefact: Artefact) -> Path:
    """Return the path of a file with the pinned content, downloading if need be.

    Raises:
        Failure: the index cannot be reached, lacks the file, or serves another one.
    """
    path = cache_folder() / artefact.sha256 / artefact.file
    if path.is_file():
        if _sha256(path) == artefact.sha256:
            return path
        say(f"{path} is damaged, fetching it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f"{path.suffix}.part{os.getpid()}")
    try:
        _download(artefact, partial)
        if (found := _sha256(partial)) != artefact.sha256:
            raise Failure(
                f"{artefact.file}: the index served a file with sha256 {found}, the pin "
                f"says {artefact.sha256}. Nothing was kept. If the pin is wrong, correct "
                "it in upstream/; otherwise do not trust this index."
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _download(artefact: Artefact, target: Path) -> None:
    index = os.environ.get("PIP_INDEX_URL", PYPI_SIMPLE_ENDPOINT)
    say(f"fetching {artefact.file}")
    try:
        with PyPISimple(index) as client:
            page = client.get_project_page(artefact.project, timeout=60)
            package = next((p for p in page.packages if p.filename == artefact.file), None)
            if package is None:
                raise Failure(f"the package index has no {artefact.file}")
            # The digest that counts is the pin's, not the index's own.
            client.download_package(
                package,
                target,
                verify=False,
                progress=tqdm_progress_factory(disable=None),
                timeout=60,
            )
    except NoSuchProjectError:
        raise Failure(f"the package index has no project {artefact.project}") from None
    except requests.RequestException as error:
        raise Failure(
            f"{artefact.file}: the download failed ({error}). Run the command again; to "
            "use another index set PIP_INDEX_URL, to work without a network copy the "
            f"file to {cache_folder() / artefact.sha256}"
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
