"""The table of fixes: what belongs together, where it is needed, and how far it has come.

`upstream/fixes.toml` is the table. A fix is one idea; it may have several patches, and one
series for each pin. Patches are named by their subject, which a rebase keeps.
"""

import email
import email.policy
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from scripts import pins, series
from scripts.shell import Failure

STATES = ("pending", "submitted", "backport", "not needed")


@dataclass(frozen=True)
class Carried:
    """What one pin has of a fix.

    Attributes:
        state: one of `STATES`.
        patches: subjects, in the order of the series.
        note: for `not needed` and `backport`, how one can tell.
        pull_request: for `submitted`, its address.
    """

    state: str
    patches: tuple[str, ...]
    note: str
    pull_request: str


@dataclass(frozen=True)
class Fix:
    """One idea.

    Attributes:
        searches: words to look for among vLLM's pull requests and issues.
        review: what the person who submits says of their own review; empty until then.
        pins: by tag of the release.
    """

    id: str
    title: str
    searches: tuple[str, ...]
    review: str
    pins: dict[str, Carried]

    def page(self, root: Path = pins.ROOT) -> Path:
        return root / "docs" / "fixes" / f"{self.id}.md"


def load(root: Path = pins.ROOT) -> dict[str, Fix]:
    """Read the table.

    Raises:
        Failure: an entry lacks something, or says what cannot be.
    """
    path = root / "upstream" / "fixes.toml"
    try:
        table = tomllib.loads(path.read_text())
    except OSError:
        raise Failure(f"{path} is missing") from None
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{path.name}: not valid TOML: {error}") from None
    return {name: _fix(name, dict(raw)) for name, raw in table.items()}


def _fix(name: str, raw: dict) -> Fix:
    title, searches = raw.pop("title", ""), tuple(raw.pop("searches", ()))
    review = raw.pop("review", "")
    if not title or not searches:
        raise Failure(f"fixes.toml: {name} needs a title and searches")
    carried = {tag: _carried(f"{name}, {tag}", dict(entry)) for tag, entry in raw.items()}
    return Fix(name, title, searches, review, carried)


def _carried(where: str, raw: dict) -> Carried:
    known = {"state", "patches", "note", "pull_request"}
    if foreign := raw.keys() - known:
        raise Failure(f"fixes.toml: {where}: unknown {', '.join(sorted(foreign))}")
    carried = Carried(
        raw.get("state", ""),
        tuple(raw.get("patches", ())),
        raw.get("note", ""),
        raw.get("pull_request", ""),
    )
    if carried.state not in STATES:
        raise Failure(f"fixes.toml: {where}: state is one of {', '.join(STATES)}")
    if carried.state == "not needed" and carried.patches:
        raise Failure(f"fixes.toml: {where}: has patches, so it is needed")
    if carried.state in ("not needed", "backport") and not carried.note:
        raise Failure(f"fixes.toml: {where}: `{carried.state}` needs a note that shows it")
    if (carried.state == "submitted") != bool(carried.pull_request):
        raise Failure(f"fixes.toml: {where}: a pull_request goes with `submitted`")
    return carried


def subject(patch: bytes) -> str:
    """The first line of a patch's message, tags included."""
    message = email.message_from_bytes(patch, policy=email.policy.default)
    return re.sub(r"\s*\n\s*", " ", str(message["Subject"] or ""))


def by_patch(pin: pins.Pin, fixes: dict[str, Fix]) -> dict[str, Fix]:
    """The fix of each patch of a series, by the patch's file name.

    Raises:
        Failure: a patch belongs to no fix or to two, or a fix names one that is not there.
    """
    names = {subject(content): name for name, content in series.read(pin.series).items()}
    owners: dict[str, Fix] = {}
    problems = []
    for fix in fixes.values():
        if pin.tag not in fix.pins:
            problems.append(f"{fix.id} says nothing of {pin.tag}")
            continue
        for title in fix.pins[pin.tag].patches:
            if title not in names:
                problems.append(f"{fix.id} names a patch that {pin.tag} has not: {title}")
            elif title in owners:
                problems.append(f"{title} is of {owners[title].id} and of {fix.id}")
            else:
                owners[title] = fix
    problems += [
        f"{pin.tag}/{name} belongs to no fix: {title}"
        for title, name in names.items()
        if title not in owners
    ]
    if problems:
        raise Failure("upstream/fixes.toml:\n" + "\n".join(problems))
    return {names[title]: fix for title, fix in owners.items()}
