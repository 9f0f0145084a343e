"""`make check`: the round trip, the series' manners, the project's and vLLM's lint."""

import email
import email.policy
import re

from scripts import checkout, series
from scripts.git import Git
from scripts.pins import ROOT, Pin
from scripts.shell import Failure, everything, say
from scripts.upstream_lint import lint, run_pre_commit

# vLLM asks for an RFC beyond this many product lines, and wants bug fixes below the first.
_AIM, _LIMIT = 250, 500
_SUBJECT_LENGTH = 80
_LINE_LENGTH = 100
_SHORTEST_BODY = 200


def check(pins: list[Pin]) -> None:
    """Raises `Failure` at the first thing that is not as it should be."""
    for pin in pins:
        patches = series.read(pin.series)
        problems = lint_series(pin, patches)
        if problems:
            raise Failure("\n".join(problems))
        report_sizes(pin, patches)
    done = run_pre_commit(ROOT, "--all-files")
    if done.returncode:
        raise Failure(f"the project's lint complains:\n{everything(done)}")
    say("project: lint clean")
    for pin in pins:
        if not pin.checkout.exists():
            checkout.apply(pin)
        with checkout.scratch_worktree(checkout.open_checkout(pin), checkout.BASE) as tree:
            round_trip(pin, tree)
            say(f"{pin.tag}: export gives the same bytes, tree {tree.tree('HEAD')}")
            lint(tree, sorted(series.net_effect(series.read(pin.series))))
            say(f"{pin.tag}: vLLM's lint clean")


def round_trip(pin: Pin, worktree: Git) -> None:
    """Apply the series in a working tree of the base and export it again.

    Raises:
        Failure: the bytes differ, or the tree is not the pin's.
    """
    patches = series.read(pin.series)
    series.apply(worktree, [pin.series / name for name in patches])
    checkout.verify_tree(pin, worktree, "HEAD", patches)
    again = series.export(worktree, checkout.BASE, "HEAD")
    if again != patches:
        differing = sorted(
            name for name in again.keys() | patches if again.get(name) != patches.get(name)
        )
        raise Failure(
            f"{pin.tag}: exporting the applied series gives other bytes for "
            f"{', '.join(differing)}; was a patch edited by hand?"
        )


def lint_series(pin: Pin, patches: dict[str, bytes]) -> list[str]:
    """What is wrong with the files, names and messages of a series."""
    problems = []
    if pin.series.is_dir():
        for stray in sorted({p.name for p in pin.series.iterdir()} - {"series", *patches}):
            problems.append(f"{pin.tag}: {stray} is not in the series")
    if pin.patched_tree and not pin.base_tree:
        problems.append(f"{pin.file.name}: patched_tree without base_tree")
    for number, (name, content) in enumerate(patches.items(), start=1):
        where = f"{pin.tag}/{name}"
        if not re.fullmatch(rf"{number:04}-[A-Za-z0-9._-]+\.patch", name):
            problems.append(f"{where}: expected a name that starts with {number:04}-")
        problems += [f"{where}: {text}" for text in _lint_message(content)]
    return problems


def report_sizes(pin: Pin, patches: dict[str, bytes]) -> None:
    """Print the product and test lines of every patch.

    Raises:
        Failure: a patch is larger than vLLM accepts without an RFC.
    """
    for name, content in patches.items():
        product, tests, docs = series.lines(content).values()
        remark = f" (aim: below {_AIM})" if product > _AIM else ""
        say(f"{pin.tag}/{name}: {product} product, {tests} test, {docs} doc lines{remark}")
        if product > _LIMIT:
            raise Failure(f"{name}: more than {_LIMIT} product lines; split it")


def _lint_message(content: bytes) -> list[str]:
    message = email.message_from_bytes(content, policy=email.policy.default)
    subject = str(message["Subject"] or "").replace("\n", "")
    body = message.get_payload(decode=True).decode()
    body = re.split(r"^(?:---|diff --git .*)$", body, maxsplit=1, flags=re.M)[0].strip()
    problems = []
    if not re.fullmatch(r"(\[[A-Z][^\[\]]*\])+ \S.*[^.\s]", subject):
        problems.append(f"subject {subject!r}: expected `[Tag][Tag] Title` without a full stop")
    if len(subject) > _SUBJECT_LENGTH:
        problems.append(f"subject has {len(subject)} characters, at most {_SUBJECT_LENGTH}")
    if len(body) < _SHORTEST_BODY:
        problems.append("the message must explain symptom, root cause and why this fix")
    if long := [line for line in body.splitlines() if len(line) > _LINE_LENGTH]:
        problems.append(f"message line longer than {_LINE_LENGTH} characters: {long[0]!r}")
    if re.search(r"^Signed-off-by:", body, re.M):
        problems.append("Signed-off-by is added by the person who submits the patch")
    if not re.search(r"^(Assisted|Co-authored|Generated)-by: ", body, re.M):
        problems.append("vLLM wants the use of AI in a trailer such as `Assisted-by:`")
    return problems
