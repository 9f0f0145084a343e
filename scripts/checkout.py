"""The checkout of a pin: apply the series to it, export it from there.

Two refs in the checkout remember what belongs to us: `refs/series/base` is the
imported release, `refs/series/head` the commit on which checkout and `patches/` last
agreed. Anything else in the checkout is the user's.
"""

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts import series
from scripts.git import Git
from scripts.pins import Pin
from scripts.shell import Failure, say
from scripts.source import import_base

BASE = "refs/series/base"
HEAD = "refs/series/head"
# Set while the working tree moves to a new series, to tell an interrupted move from edits.
_NEXT = "refs/series/next"
# A file of the checkout's git folder: which series is being resolved in it.
_RESOLVING = "series-resolving"


def apply(pin: Pin, *, resolve: bool = False) -> None:
    """Make the checkout hold the release and the series; run again, change nothing.

    Args:
        pin: the release.
        resolve: leave a patch that conflicts in the checkout, to be resolved there.

    Raises:
        Failure: the checkout holds edits or commits that are not in `patches/`, a patch
            does not apply, or the result is not the tree that the pin names.
    """
    patches = series.read(pin.series)
    if not pin.checkout.exists():
        _create(pin, patches, resolve=resolve)
    else:
        repository = open_checkout(pin)
        _finish_interrupted_move(repository)
        _refuse_edits(repository)
        if series.export(repository, BASE, "HEAD") == patches:
            repository("update-ref", HEAD, "HEAD")
            verify_tree(pin, repository, "HEAD", patches)
            say(f"{pin.tag}: already applied ({len(patches)} patches); nothing to do")
            return
        _refuse_commits(repository)
        _update(pin, repository, resolve=resolve)
    say(f"{pin.tag}: {len(patches)} patches applied in {pin.checkout}")


def export(pin: Pin) -> None:
    """Write the checkout's commits to `patches/<pin>/` and the pin's tree.

    Raises:
        Failure: the checkout is missing, has uncommitted edits, or is in the middle of
            a rebase.
    """
    repository = open_checkout(pin)
    _finish_interrupted_move(repository)
    _refuse_edits(repository)
    patches = series.export(repository, BASE, "HEAD")
    base, tree = repository.tree(BASE), repository.tree("HEAD")
    before = repository.find(HEAD)
    # A clone may differ from the recorded source; then its trees are not the pin's.
    ours = pin.base_tree in ("", base)
    there = series.read(pin.series) if (pin.series / "series").is_file() else {}
    if patches == there and (tree == pin.patched_tree or not ours):
        repository("update-ref", HEAD, "HEAD")
        say(f"{pin.tag}: {len(patches)} patches, unchanged")
        return
    _refuse_overwriting(pin, repository, there, patches)
    replay(repository, patches)
    series.write(pin.series, patches)
    repository.path(_RESOLVING).unlink(missing_ok=True)
    if ours:
        pin.record_trees(base, tree)
    else:
        say(f"note: {pin.file.name} keeps its patched_tree: this is not the recorded source")
    repository("update-ref", HEAD, "HEAD")
    say(f"{pin.tag}: {len(patches)} patches written to {pin.series}")
    # range-diff takes no empty range.
    if repository.find(BASE) not in (before, repository.find("HEAD")):
        say(repository("range-diff", f"{BASE}..{before}", f"{BASE}..HEAD"))


def replay(repository: Git, patches: dict[str, bytes]) -> None:
    """Prove that the patches lead to HEAD and back to the same bytes.

    Raises:
        Failure: they do not, which is for the author of a commit to mend.
    """
    with scratch_worktree(repository, BASE) as scratch, tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in patches]
        for path in paths:
            path.write_bytes(patches[path.name])
        try:
            series.apply(scratch, paths)
            again = series.export(scratch, BASE, "HEAD")
        except Failure as error:
            raise Failure(
                f"nothing was written, as a commit is no good patch: {error}"
            ) from None
        if again != patches or scratch.tree("HEAD") != repository.tree("HEAD"):
            wrong = sorted(n for n in again.keys() | patches if again.get(n) != patches.get(n))
            raise Failure(
                "nothing was written: a commit does not survive as a patch "
                f"({', '.join(wrong) or 'its files'}). Look for a line `---`, `From:` or "
                "`Subject:` in its message, an empty commit, or odd line ends."
            )


def _refuse_overwriting(
    pin: Pin, repository: Git, there: dict[str, bytes], patches: dict[str, bytes]
) -> None:
    """Stop if patches/ holds what neither the last apply or export nor the checkout knows."""
    if not there:
        return  # a new pin, or an interrupted export
    if not patches:
        raise Failure(f"the checkout has no commits, patches/{pin.tag} has {len(there)}")
    resolving = repository.path(_RESOLVING)
    if resolving.is_file() and resolving.read_text() == _digest(there):
        return
    agreed = series.export(repository, BASE, HEAD)
    foreign = [n for n, c in there.items() if c not in (agreed.get(n), patches.get(n))]
    foreign += [n for n in agreed.keys() & patches.keys() if n not in there]
    if foreign:
        raise Failure(
            f"patches/{pin.tag} has changed since it was applied here: "
            f"{', '.join(sorted(foreign))}. Keep the checkout's commits on a branch, "
            "`git reset --keep refs/series/head`, `make apply`, and bring them back."
        )


def _digest(patches: dict[str, bytes]) -> str:
    return hashlib.sha256(repr(list(patches.items())).encode()).hexdigest()


def open_checkout(pin: Pin) -> Git:
    """The pin's checkout, known to be one of ours.

    Raises:
        Failure: it is missing, or was made by something else.
    """
    if not pin.checkout.exists():
        raise Failure(f"there is no checkout yet: run `make apply PIN={pin.tag}`")
    repository = Git(pin.checkout)
    if not (pin.checkout / ".git").is_dir() or not repository.find(BASE):
        raise Failure(
            f"{pin.checkout} was not made by `make apply`. Move it away and run "
            "`make apply` again."
        )
    return repository


def require_series(pin: Pin) -> Git:
    """The checkout, holding exactly the series of `patches/` and nothing else."""
    repository = open_checkout(pin)
    _refuse_edits(repository)
    if series.export(repository, BASE, "HEAD") != series.read(pin.series):
        raise Failure(
            f"{pin.checkout} does not hold the series in {pin.series}: run "
            f"`make export PIN={pin.tag}` to keep the checkout's commits, or "
            f"`make apply PIN={pin.tag}` to see what is in the way"
        )
    return repository


@contextlib.contextmanager
def scratch_worktree(repository: Git, revision: str) -> Iterator[Git]:
    """A temporary working tree of `revision`, whatever the checkout holds."""
    parent = Path(tempfile.mkdtemp(prefix=".scratch-", dir=repository.folder.parent))
    worktree = parent / repository.folder.name
    try:
        repository("worktree", "prune")
        repository("worktree", "add", "--quiet", "--detach", worktree, revision)
        yield Git(worktree)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
        repository("worktree", "prune")


def verify_tree(pin: Pin, repository: Git, revision: str, patches: dict[str, bytes]) -> None:
    """Compare what the series produced with what the pin and the patches say.

    Raises:
        Failure: a file differs; the message names it.
    """
    if not pin.patched_tree:
        say(f"note: {pin.file.name} has no patched_tree yet; `make export` records it")
        return
    if repository.tree(BASE) == pin.base_tree:
        if (tree := repository.tree(revision)) != pin.patched_tree:
            raise Failure(
                f"the series produces tree {tree}, {pin.file.name} says "
                f"{pin.patched_tree}: patches/ and the pin's file do not belong together. "
                "Restore them from git, or take the patches as they are with "
                f"`make apply PIN={pin.tag} RESOLVE=1` and `make export PIN={pin.tag}`."
            )
        return
    # Another source: equal where it matters, in the files that the series touches.
    for path, (before, after) in series.net_effect(patches).items():
        for where, expected in ((BASE, before), (revision, after)):
            found = repository.find(f"{where}:{path}")
            if found != expected:
                raise Failure(f"{path} is blob {found} in {where}, expected {expected}")


def _create(pin: Pin, patches: dict[str, bytes], *, resolve: bool) -> None:
    """Build a checkout beside its place and move it there when it is whole."""
    partial = pin.checkout.with_name(f".{pin.tag}.partial")
    if partial.exists():
        say("an earlier run was interrupted; starting afresh")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    conflict = None
    try:
        repository = Git(partial)
        repository("init", "--quiet")
        base = import_base(pin, repository)
        repository("update-ref", BASE, base)
        repository("update-ref", HEAD, base)
        repository("reset", "--quiet", "--hard", base)
        try:
            series.apply(repository, _paths(pin), three_way=resolve)
        except Failure as error:
            if not resolve:
                raise _with_way_on(pin, error) from None
            repository.path(_RESOLVING).write_text(_digest(patches))
            conflict = Failure(str(error).replace(str(partial), str(pin.checkout)))
        else:
            if not resolve:
                verify_tree(pin, repository, "HEAD", patches)
            repository("update-ref", HEAD, "HEAD")
        partial.rename(pin.checkout)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if conflict:
        raise conflict


def _update(pin: Pin, repository: Git, *, resolve: bool) -> None:
    """Replace the series in a clean checkout by the one in `patches/`."""
    if resolve:
        repository("reset", "--quiet", "--keep", BASE)
        repository("update-ref", HEAD, BASE)
        repository.path(_RESOLVING).write_text(_digest(series.read(pin.series)))
        series.apply(repository, _paths(pin), three_way=True)
        repository("update-ref", HEAD, "HEAD")
        return
    with scratch_worktree(repository, BASE) as scratch:
        try:
            series.apply(scratch, _paths(pin))
        except Failure as error:
            raise _with_way_on(pin, error) from None
        verify_tree(pin, scratch, "HEAD", series.read(pin.series))
        new = scratch("rev-parse", "HEAD")
    _move(repository, new)


def _move(repository: Git, new: str) -> None:
    repository("update-ref", _NEXT, new)
    repository("reset", "--quiet", "--keep", new)
    repository("update-ref", HEAD, new)
    repository("update-ref", "-d", _NEXT)


def _finish_interrupted_move(repository: Git) -> None:
    """Complete a move that was cut off, unless somebody edited the files since."""
    new = repository.find(_NEXT)
    if new is None:
        return
    if repository.find("HEAD") not in (repository.find(HEAD), new):
        raise Failure(
            f"{repository.folder} has commits made after an interrupted `make apply`; look at "
            f"`git log`, then `git update-ref -d {_NEXT}` and run the command again"
        )
    for path in (entry[3:] for entry in repository("status", "--porcelain", "-z").split("\0")):
        if not path:
            continue
        file = repository.folder / path
        found = repository("hash-object", path) if file.is_file() else None
        if found not in {repository.find(f"{side}:{path}") for side in ("HEAD", new)}:
            raise Failure(
                f"{file} was edited after an interrupted `make apply`: save it elsewhere, "
                f"`git checkout {new[:12]} -- {path}`, and run `make apply` again"
            )
    say("an earlier run was interrupted; finishing it")
    repository.path("index.lock").unlink(missing_ok=True)
    repository("reset", "--quiet", "--hard", new)
    repository("update-ref", HEAD, new)
    repository("update-ref", "-d", _NEXT)


def _refuse_edits(repository: Git) -> None:
    folder = repository.folder
    for state in ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
        if repository.path(state).exists():
            raise Failure(
                f"{folder} is in the middle of a rebase, am, merge or cherry-pick: finish "
                "it or abort it there first"
            )
    if edits := repository("status", "--porcelain"):
        raise Failure(
            f"{folder} has local edits; commit, stash or discard them first:\n{edits}"
        )


def _refuse_commits(repository: Git) -> None:
    if repository.find("HEAD") != repository.find(HEAD):
        commits = repository("log", "--oneline", "--left-right", HEAD + "...HEAD")
        raise Failure(
            f"{repository.folder} has commits that are not in patches/ (>), or lacks some (<):"
            f"\n{commits}\n`make export` writes the series as it is there; "
            "`git reset --keep refs/series/head` goes back to what was applied."
        )


def _with_way_on(pin: Pin, error: Failure) -> Failure:
    return Failure(
        f"{error}\nNothing was changed. `make apply PIN={pin.tag} RESOLVE=1` stops at this "
        "patch in the checkout, so that you can resolve it and export the series."
    )


def _paths(pin: Pin) -> list[Path]:
    return [pin.series / name for name in series.read(pin.series)]
