"""`make drift SOURCE=...`: what of a series a newer vLLM still needs.

The patches are tried one by one on the newer source, in a repository of their own that is
thrown away: neither the checkout nor `patches/` changes. A patch that applies may still be
superseded by another cure; only its tests can tell.
"""

import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import unidiff

from scripts import checkout, fixes, series
from scripts.git import Git
from scripts.pins import Pin
from scripts.shell import Failure, say
from scripts.source import _GENERATED

NEEDED = "still needed"
PARTLY = "partly there"
THERE = "already there"
CONFLICT = "conflicts"
# A line of more characters than this says where it comes from.
_TELLING = 12
_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """What became of one patch.

    Attributes:
        text: for people; which files conflict, or how much is there already.
    """

    patch: str
    kind: str
    text: str = ""


def drift(pin: Pin, source: Path) -> list[Verdict]:
    """Try a series on another source and report patch by patch.

    Args:
        pin: whose series.
        source: a source distribution, a folder with its content, or a git clone, of which
            the current commit is taken.

    Raises:
        Failure: the source is none of vLLM.
    """
    owners = fixes.by_patch(pin, fixes.load(pin.root))
    with tempfile.TemporaryDirectory(prefix=".drift-", dir=_scratch(pin)) as folder:
        repository = Git(Path(folder, "vllm"))
        _prepare(pin, repository)
        _check_out(pin, repository, source.expanduser(), Path(folder))
        verdicts = try_series(repository, pin)
    say(f"{pin.tag}: {len(verdicts)} patches on {source}")
    for verdict in verdicts:
        detail = f": {verdict.text}" if verdict.text else ""
        say(f"{verdict.kind:13}  {verdict.patch} ({owners[verdict.patch].id}){detail}")
    kinds = [verdict.kind for verdict in verdicts]
    say(", ".join(f"{kinds.count(k)} {k}" for k in (NEEDED, PARTLY, THERE, CONFLICT)))
    say(f"`{NEEDED}`: the patch applies. Whether its fault is still there, its tests say.")
    return verdicts


def _scratch(pin: Pin) -> Path:
    folder = pin.root / "build"
    folder.mkdir(exist_ok=True)
    return folder


def _prepare(pin: Pin, repository: Git) -> None:
    """A repository with the release, and with every state of it that a patch starts from.

    A three-way merge needs these.
    """
    origin = checkout.open_checkout(pin)
    repository.folder.mkdir()
    repository("init", "--quiet")
    objects = origin.path("objects").resolve()
    repository.path("objects/info/alternates").write_text(f"{objects}\n")
    repository("reset", "--quiet", "--hard", origin("rev-parse", checkout.BASE))
    series.apply(repository, [pin.series / name for name in series.read(pin.series)])


def _check_out(pin: Pin, repository: Git, source: Path, scratch: Path) -> None:
    """Replace all files by those of `source`, as a commit without history."""
    if (source / ".git").exists():
        repository("fetch", "--quiet", "--depth=1", source.resolve().as_uri(), "HEAD")
        tree = repository.tree("FETCH_HEAD")
    else:
        folder = source if source.is_dir() else _unpack(source, scratch / "source")
        _expect_vllm(folder, source)
        repository("read-tree", "--empty")
        repository(
            f"--work-tree={folder.resolve()}", "add", "--all", "--force", ".", cwd=folder
        )
        generated = [f":(top){name}" for name in _GENERATED]
        repository("rm", "-r", "--quiet", "--cached", "--ignore-unmatch", "--", *generated)
        tree = repository("write-tree")
    commit = repository("commit-tree", tree, "-m", f"{source}", date=f"{pin.released} +0000")
    repository("reset", "--quiet", "--hard", commit)
    repository("clean", "--quiet", "-d", "--force", "-x")
    _expect_vllm(repository.folder, source)


def _expect_vllm(folder: Path, source: Path) -> None:
    if not (folder / "vllm" / "__init__.py").is_file():
        raise Failure(f"{source} has no vllm/__init__.py: it is no source of vLLM")


def _unpack(archive: Path, folder: Path) -> Path:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise Failure(
            f"SOURCE={archive} is no folder and no source distribution: {error}"
        ) from None
    inside = list(folder.iterdir())
    return inside[0] if len(inside) == 1 else folder


def try_series(repository: Git, pin: Pin) -> list[Verdict]:
    """Apply what applies, in order; what conflicts is left out."""
    verdicts: list[Verdict] = []
    left_out: dict[str, str] = {}  # path -> patch
    for name, content in series.read(pin.series).items():
        files = [file.path for file in series.touched(content)]
        verdict = _try(repository, pin.series / name)
        if verdict.kind == CONFLICT:
            if earlier := sorted({left_out[path][:4] for path in files if path in left_out}):
                text = f"{verdict.text}; here without {_some(earlier)}"
                verdict = Verdict(name, CONFLICT, text)
            left_out |= dict.fromkeys(files, name)
        verdicts.append(verdict)
    return verdicts


def _try(repository: Git, patch: Path) -> Verdict:
    before = repository("rev-parse", "HEAD")
    done = repository.attempt(
        "am", "--quiet", "--3way", "--keep-non-patch", "--keep-cr", "--no-gpg-sign",
        "--committer-date-is-author-date", patch,
    )  # fmt: skip
    content = patch.read_bytes()
    files = series.touched(content)
    if done.returncode:
        unmerged = repository("diff", "--name-only", "--diff-filter=U").split()
        repository("am", "--abort")
        repository("reset", "--quiet", "--hard", before)
        repository("clean", "--quiet", "-d", "--force")
        return _conflict(repository, patch.name, content, unmerged)
    if repository("rev-parse", "HEAD") == before:
        return Verdict(patch.name, THERE)
    made = repository("diff", "--numstat", before, "HEAD").splitlines()
    lines = sum(int(n) for line in made for n in line.split("\t")[:2] if n.isdigit())
    wanted = sum(file.added + file.removed for file in files)
    if lines < wanted:
        return Verdict(patch.name, PARTLY, f"{wanted - lines} of {wanted} changed lines")
    return Verdict(patch.name, NEEDED)


def _conflict(repository: Git, name: str, content: bytes, unmerged: list[str]) -> Verdict:
    """Tell a patch that later changes have built upon from one that does not fit."""
    added, there = 0, 0
    for file in unidiff.PatchSet(content.decode(errors="surrogateescape")):
        path = repository.folder / file.path
        lines = path.read_text(errors="surrogateescape").split("\n") if path.is_file() else []
        present = {line.strip() for line in lines}
        # Short lines, such as a bracket, are everywhere.
        wanted = [line.value.strip() for hunk in file for line in hunk if line.is_added]
        wanted = [line for line in wanted if len(line) > _TELLING]
        added += len(wanted)
        there += sum(line in present for line in wanted)
    if added == there:
        return Verdict(name, THERE, "later changes have built upon it")
    gone = [
        file.path
        for file in series.touched(content)
        if file.before and not (repository.folder / file.path).is_file()
    ]
    texts = [f"{path} is gone" for path in gone]
    texts += [path for path in unmerged if path not in gone]
    return Verdict(name, CONFLICT, f"{_some(texts)} ({there} of {added} added lines are there)")


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + more
