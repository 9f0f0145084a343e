"""A patch series on disk: `patches/<pin>/series` and the patches it names."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import unidiff

from scripts.git import Git
from scripts.shell import Failure, everything


@dataclass(frozen=True)
class TouchedFile:
    """What a patch does to one file; ids are git blob ids, None where no file is."""

    path: str
    before: str | None
    after: str | None
    added: int
    removed: int


def names(folder: Path) -> list[str]:
    """The patches in the order of the `series` file.

    Raises:
        Failure: `series` is missing, or names a file that is not there.
    """
    listing = folder / "series"
    if not listing.is_file():
        raise Failure(f"{listing} is missing")
    found = listing.read_text().split()
    for name in found:
        if not (folder / name).is_file():
            raise Failure(f"{listing} names {name}, which is not there")
    return found


def read(folder: Path) -> dict[str, bytes]:
    """Content of every patch, by name, in order; empty where there is no series yet."""
    if not (folder / "series").is_file() and not list(folder.glob("*.patch")):
        return {}
    return {name: (folder / name).read_bytes() for name in names(folder)}


def export(repository: Git, base: str, head: str) -> dict[str, bytes]:
    """The commits from `base` to `head` as patches: a function of their content only."""
    if merges := repository("log", "--merges", "--oneline", f"{base}..{head}"):
        raise Failure(f"a series has no merge commits; rebase these away:\n{merges}")
    with tempfile.TemporaryDirectory() as folder:
        repository(
            "format-patch",
            "--output-directory", folder,
            "--keep-subject", "--no-numbered", "--zero-commit", "--no-signature",
            "--full-index", "--no-stat", "--no-base", "--no-attach", "--no-thread",
            "--no-cover-letter", "--no-notes", "--no-ext-diff", "--no-textconv",
            f"{base}..{head}",
        )  # fmt: skip
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def write(folder: Path, patches: dict[str, bytes]) -> None:
    """Make `folder` hold this series; run again, it repairs an interrupted run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in patches.items():
        (folder / name).write_bytes(content)
    (folder / "series").write_text("".join(f"{name}\n" for name in patches))
    for stale in {path.name for path in folder.glob("*.patch")} - patches.keys():
        (folder / stale).unlink()


def touched(patch: bytes) -> list[TouchedFile]:
    """The files of one patch, read from its `index` lines and hunks."""
    files = []
    try:
        parsed = unidiff.PatchSet(patch.decode(errors="surrogateescape"))
    except unidiff.UnidiffParseError as error:
        raise Failure(f"a patch cannot be read: {error}") from None
    for file in parsed:
        before, after = _blob_ids(file.patch_info or [])
        if before is after is None:
            continue  # only the mode changes, and no wheel carries that
        files.append(TouchedFile(file.path, before, after, file.added, file.removed))
    return files


def lines(patch: bytes) -> dict[str, int]:
    """The lines of product, tests and docs that a patch adds and removes."""
    count = {"product": 0, "test": 0, "doc": 0}
    for file in touched(patch):
        if file.path.startswith("tests/"):
            kind = "test"
        elif file.path.startswith("docs/") or file.path.endswith(".md"):
            kind = "doc"
        else:
            kind = "product"
        count[kind] += file.added + file.removed
    return count


def net_effect(patches: dict[str, bytes]) -> dict[str, tuple[str | None, str | None]]:
    """For every file of the series: its blob id before the series and after it."""
    effect: dict[str, tuple[str | None, str | None]] = {}
    for patch in patches.values():
        for file in touched(patch):
            first = effect[file.path][0] if file.path in effect else file.before
            effect[file.path] = (first, file.after)
    return effect


def apply(repository: Git, patches: list[Path], *, three_way: bool = False) -> None:
    """Commit each patch on HEAD, keeping its author, date and whole subject.

    Raises:
        Failure: a patch does not apply; the message names patch, file and hunk. HEAD
            and working tree are then as before, except that with `three_way` the
            conflict is left in the working tree to be resolved.
    """
    options = [
        "--keep-non-patch",
        "--keep-cr",
        "--committer-date-is-author-date",
        "--no-gpg-sign",
    ]
    if three_way:
        options.append("--3way")
    done = repository.attempt("am", "--quiet", *options, *patches) if patches else None
    if done is None or done.returncode == 0:
        return
    state = repository.path("rebase-apply/next")
    if not state.is_file():
        raise Failure(f"git cannot read the series: {everything(done)}")
    applied = int(state.read_text()) - 1
    failed = patches[applied]
    if three_way:
        raise Failure(
            f"{failed.name} conflicts:\n{everything(done)}\n"
            f"Resolve it in {repository.folder}, `git add` the files, "
            "`git am --continue`, and when the last patch is in, `make export`. "
            "`git am --abort` and `make apply` give up."
        )
    reason = everything(repository.attempt("apply", "--check", "--verbose", failed))
    repository("am", "--abort")
    raise Failure(
        f"{failed.name} (patch {applied + 1} of {len(patches)}) does not apply:\n"
        f"{reason or everything(done)}"
    )


def _blob_ids(header: list[str]) -> tuple[str | None, str | None]:
    for line in header:
        if ids := re.match(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})", line):
            before, after = (blob if blob.strip("0") else None for blob in ids.groups())
            return before, after
    return None, None
