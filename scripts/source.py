"""Import a pinned release as one commit that depends on its content only."""

import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from scripts.downloads import fetch
from scripts.git import Git, fetch_tag
from scripts.pins import Pin
from scripts.shell import Failure, say

_ANSWER_SECONDS = 15
# What packaging adds to a source distribution.
_GENERATED = ("PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py")


def import_base(pin: Pin, repository: Git) -> str:
    """Create the base commit in an empty repository and return its id.

    The source is the clone named by `VLLM_REPO`, else the pin's repository where it
    can be reached, else the source distribution. Symbolic links, which a source
    distribution cannot hold, are left out of either.

    Raises:
        Failure: no source can be had, or one is not what the pin says.
    """
    if chosen := os.environ.get("VLLM_REPO"):
        tree = _from_git(pin, repository, chosen)
        say(f"source: {pin.tag} from {chosen}")
    else:
        try:
            tree = _from_git(pin, repository, pin.repository)
            say(f"source: {pin.tag} from {pin.repository}")
        except Unreachable:
            tree = _from_sdist(pin, repository)
            say(f"source: {pin.sdist.file} (git repository not reachable)")
    if pin.base_tree and tree != pin.base_tree:
        say(
            f"note: this source is not the recorded one byte for byte (tree {tree}, "
            f"recorded {pin.base_tree}); the files that the series touches are checked"
        )
    message = f"vLLM {pin.version}\n\nImported from {pin.tag}, commit {pin.commit}."
    return repository("commit-tree", tree, "-m", message, date=f"{pin.released} +0000")


class Unreachable(Failure):
    """The pin's repository does not answer."""


def _from_git(pin: Pin, repository: Git, source: str) -> str:
    try:
        commit = fetch_tag(repository, source, pin.tag, _ANSWER_SECONDS)
    except Failure as error:
        raise Unreachable(str(error)) from None
    if not commit.startswith(pin.commit):
        raise Failure(
            f"{source}: tag {pin.tag} is commit {commit}, the pin says {pin.commit}. "
            "Nothing was changed."
        )
    repository("read-tree", commit)
    special = [
        line.partition("\t")[2]
        for line in repository("ls-files", "--stage", "-z").split("\0")
        if line.startswith(("120000", "160000"))
    ]
    if special:
        repository("update-index", "--force-remove", "--", *special)
    return repository("write-tree")


def _from_sdist(pin: Pin, repository: Git) -> str:
    archive = fetch(pin.sdist)
    with tempfile.TemporaryDirectory(dir=repository.folder.parent) as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        (top,) = Path(scratch).iterdir()
        for name in _GENERATED:
            path = top / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        # --force: upstream's own .gitignore hides files that it tracks.
        repository(f"--work-tree={top}", "add", "--all", "--force", ".", cwd=top)
    return repository("write-tree")
