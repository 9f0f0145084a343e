"""`make submit FIX=id`: all that a person needs to propose a fix to vLLM, and nothing sent.

vLLM takes changes to its main branch only, so it is the newest pin's patches that are meant.
What can be checked is checked; what only a person can do is named.
"""

import email
import email.policy
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from scripts import checkout, checks, fixes, series
from scripts.fixes import Fix
from scripts.git import Git
from scripts.pins import Pin
from scripts.shell import Failure, say
from scripts.testing import is_test
from scripts.upstream_lint import lint

_REPOSITORY = "vllm-project/vllm"
_TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
# vLLM closes what a contributor without write access opens beyond this.
_MOST_OPEN = 6
_SECTIONS = ("Symptom", "Root cause", "Request flow", "Fix", "Evidence", "Limits")


@dataclass(frozen=True)
class Proposal:
    """One patch, which is one pull request.

    Attributes:
        needs: patches without which it does not apply to the release.
    """

    name: str
    content: bytes
    needs: tuple[str, ...]

    @property
    def title(self) -> str:
        return fixes.subject(self.content)

    @property
    def message(self) -> str:
        message = email.message_from_bytes(self.content, policy=email.policy.default)
        body = message.get_payload(decode=True).decode(errors="replace")
        body = re.split(r"^(?:---|diff --git .*)$", body, maxsplit=1, flags=re.M)[0]
        return re.sub(r"\n\n(?:[A-Z][\w-]+-by: .*\n?)+\s*$", "", body).strip()

    @property
    def tests(self) -> list[str]:
        """The test files that it adds or changes."""
        files = series.touched(self.content)
        return [file.path for file in files if file.after and is_test(file.path)]

    @property
    def new_tests(self) -> list[str]:
        found = re.findall(rb"^\+(?:async )?def (test_\w+)", self.content, re.M)
        return [name.decode() for name in found]


def submit(name: str, pin: Pin) -> None:
    """Print the pull request of each patch of a fix, searches and checks first.

    Raises:
        Failure: there is no such fix, nothing of it is to be submitted, or a check fails.
    """
    table = fixes.load(pin.root)
    if name not in table:
        raise Failure(f"FIX={name} is not known; choose from {', '.join(table)}")
    fix = table[name]
    owners = fixes.by_patch(pin, table)
    carried = fix.pins[pin.tag]
    if carried.state == "not needed":
        raise Failure(f"{pin.tag} does not need {name}: {carried.note}")
    if carried.state == "submitted":
        raise Failure(f"{name} has been submitted: {carried.pull_request}")
    names = [patch for patch, owner in owners.items() if owner == fix]
    if not names:
        raise Failure(f"{name} has no patch for {pin.tag} yet")
    repository = checkout.require_series(pin)
    page = read_page(fix.page(pin.root))
    problems = []
    _say_searches(fix, pin)
    for number, patch in enumerate(names, start=1):
        part = f", part {number} of {len(names)}" if len(names) > 1 else ""
        say(f"\n==== {pin.tag}/{patch}{part}")
        with checkout.scratch_worktree(repository, checkout.BASE) as tree:
            proposal = propose(pin, tree, patch)
            problems += check(pin, tree, proposal)
            template = (tree.folder / _TEMPLATE).read_text()
        _say_pull_request(fix, pin, proposal, page, template)
    _say_what_is_left(fix, table, pin)
    if problems:
        raise Failure("not ready to be submitted:\n" + "\n".join(problems))


def read_page(path: Path) -> dict[str, str]:
    """The sections of a fix's page, by heading.

    Raises:
        Failure: there is no page, or it lacks a section.
    """
    if not path.is_file():
        raise Failure(f"{path} is missing")
    parts = re.split(r"^## (.+)\n", path.read_text(), flags=re.M)
    page = {title: text.strip() for title, text in zip(parts[1::2], parts[2::2])}
    if missing := [title for title in _SECTIONS if not page.get(title)]:
        raise Failure(f"{path}: no section {', '.join(missing)}")
    return page


def propose(pin: Pin, tree: Git, name: str) -> Proposal:
    """Find out what a patch needs, and leave `tree` with that and the patch applied.

    Args:
        pin: the release.
        tree: a working tree of it.
        name: of the patch.

    Raises:
        Failure: the patch does not even apply in its place in the series.
    """
    patches = series.read(pin.series)
    order = list(patches)
    paths = {patch: {file.path for file in series.touched(patches[patch])} for patch in order}
    needs: list[str] = []
    while failed := _first_to_fail(pin, tree, [*needs, name]):
        # Whatever it stumbles over, the patch before it in the same files is in its way.
        earlier = order[: order.index(failed)]
        related = [p for p in earlier if p not in needs and paths[p] & paths[failed]]
        if not related:
            raise Failure(f"{failed} does not apply")
        needs = sorted([*needs, related[-1]], key=order.index)
    for candidate in needs[:]:
        fewer = [other for other in needs if other != candidate]
        if not _first_to_fail(pin, tree, [*fewer, name]):
            needs = fewer
    _first_to_fail(pin, tree, [*needs, name])
    return Proposal(name, patches[name], tuple(needs))


def _first_to_fail(pin: Pin, tree: Git, names: list[str]) -> str | None:
    """Apply patches to the release; which of them does not apply, if any."""
    tree("reset", "--quiet", "--hard", checkout.BASE)
    for name in names:
        try:
            series.apply(tree, [pin.series / name])
        except Failure:
            return name
    return None


def check(pin: Pin, tree: Git, proposal: Proposal) -> list[str]:
    """Say of everything that can be checked whether it is right, and return what is not."""
    problems = []

    def told(what: str, wrong: list[str] | str) -> None:
        say(f"{'WRONG' if wrong else 'ok':6} {what}")
        for problem in [wrong] if isinstance(wrong, str) else wrong:
            if problem:
                say(f"       {problem}")
                problems.append(f"{proposal.name}: {problem}")

    if proposal.needs:
        say("note   applies after:")
        for name in proposal.needs:
            say(f"       {name}")
    else:
        told("applies to the release alone", "")
    where = f"{pin.tag}/{proposal.name}: "
    manners = checks.lint_series(pin, series.read(pin.series))
    told("message", [text.removeprefix(where) for text in manners if text.startswith(where)])
    count = series.lines(proposal.content)
    size = ", ".join(f"{lines} {kind}" for kind, lines in count.items())
    limit = f"more than {checks._LIMIT} product lines want an RFC first"
    told(f"size: {size} lines", limit if count["product"] > checks._LIMIT else "")
    if count["product"] > checks._AIM:
        say(f"       vLLM calls more than {checks._AIM} product lines complex: say why")
    missing = [path for path in proposal.tests if not (tree.folder / path).is_file()]
    told(
        f"tests: {' '.join(proposal.tests)}",
        [f"{path} is missing" for path in missing] or ("" if proposal.tests else "it has none"),
    )
    try:
        lint(tree, [file.path for file in series.touched(proposal.content) if file.after])
        told("vLLM's lint", "")
    except Failure as error:
        told("vLLM's lint", str(error))
    return problems


def pull_request(
    fix: Fix, pin: Pin, proposal: Proposal, page: dict[str, str], template: str
) -> str:
    """The description by vLLM's template, with places for the person who submits."""
    symptom, _, rest = proposal.message.partition("\n\n")
    tests = ", ".join(f"`{name}`" for name in proposal.new_tests)
    titles = [fixes.subject((pin.series / name).read_bytes()) for name in proposal.needs]
    flow = _said_of(pin.tag, page["Request flow"])
    answers = {
        "Overview": symptom,
        "Claims": _claims(fix, pin, page),
        "Validation": (
            "New tests, some of which fail without the change, and all pass with it:\n"
            f"{tests}.\n\n```sh\npytest {' '.join(proposal.tests)}\n```\n\n"
            "<!-- TO DO, by hand: the output on current main, without and with it. -->"
        ),
        "Details": "\n\n".join(
            [
                rest,
                *([] if re.search(r"^1\. ", rest, re.M) else [f"**Request flow**\n\n{flow}"]),
                f"**Limits**\n\n{_said_of(pin.tag, page['Limits']) or 'None known.'}",
                *(
                    ["**Builds on**\n\n" + "\n".join(f"- {t}" for t in titles)]
                    if titles
                    else []
                ),
                f"**Review**\n\n{fix.review or '<!-- TO DO, by hand: your statement. -->'}",
            ]
        ),
    }
    text = re.sub(r"<!--.*?-->\n*", "", template, flags=re.S)
    for title, answer in answers.items():
        heading = f"## {title}\n"
        if heading not in text:
            raise Failure(f"vLLM's template has no `## {title}` any more")
        text = text.replace(heading, f"{heading}\n{answer}\n")
    return text.replace("- [ ] AI assistance was used", "- [x] AI assistance was used").strip()


def _claims(fix: Fix, pin: Pin, page: dict[str, str]) -> str:
    claims = _said_of(pin.tag, page["Fix"])
    count = len(fix.pins[pin.tag].patches)
    if count > 1:
        claims = f"All {count} parts of this fix together; this is one of them.\n\n{claims}"
    return claims


def _said_of(tag: str, text: str) -> str:
    """What a page says of one pin or of all: no word about others, and no links of ours.

    A point or paragraph about one pin alone begins with its tag.
    """
    said: list[str] = []
    for point in re.split(r"\n(?=- |\d+\. )|\n\n", text):
        about = re.match(r"(- |\d+\. )?(v\d+\.\d+\.\d+)(: |\b)", point)
        if about and about[2] != tag:
            continue
        if about and about[3]:
            rest = point[about.end() :]
            point = (about[1] or "") + rest[:1].upper() + rest[1:]
        said.append(re.sub(r" ?\(\[[^]]*\]\([^)]*\)\)|\[([^]]*)\]\([^)]*\)", r"\1", point))
    numbered = itertools.count(1)
    return "\n".join(re.sub(r"^\d+(?=\. )", lambda _: f"{next(numbered)}", p) for p in said)


def _say_searches(fix: Fix, pin: Pin) -> None:
    say(f"Search for duplicates first; as of {pin.tag} nobody may have told this project:")
    for words in fix.searches:
        for kind in ("prs", "issues"):
            say(f"  gh search {kind} --repo {_REPOSITORY} -- '{words}'")


def _say_pull_request(
    fix: Fix, pin: Pin, proposal: Proposal, page: dict[str, str], template: str
) -> None:
    say(f"\n---- title\n{proposal.title}\n---- description")
    say(pull_request(fix, pin, proposal, page, template))
    say("---- end of description")


def _say_what_is_left(fix: Fix, table: dict[str, Fix], pin: Pin) -> None:
    pending = sum(
        other.pins[pin.tag].state == "submitted"
        for other in table.values()
        if pin.tag in other.pins
    )
    say(
        "\nWhat only a person can do:\n"
        "- search for duplicates, and say in the description why this is none\n"
        "- read every changed line, run the tests on current main, put the output in\n"
        + (
            "- check that `review` in upstream/fixes.toml is still what you say\n"
            if fix.review
            else f"- write `review` of [{fix.id}] in upstream/fixes.toml, in your own words\n"
        )
        + "- sign off: on a branch of vLLM's main, `git am --3way PATCH`, then\n"
        "  `git commit --amend --no-edit --signoff`\n"
        f"- have at most {_MOST_OPEN} pull requests open ({pending} are, by the table)\n"
        f'- afterwards, `state = "submitted"` and `pull_request` in [{fix.id}."{pin.tag}"]\n'
        "Nothing was sent."
    )
