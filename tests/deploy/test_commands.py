"""Commands and links of the README, CONTRIBUTING.md and docs/: each leads somewhere.

Commands of the planner are run, those for vLLM go through the pin's own parser. Of others, the
target, program, options and paths must exist. A command that starts with none of what is known
here fails: teach this file about it.
"""

import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts import plan_capacity, verify_server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "deploy").iterdir() if path.is_file())
PROGRAMS = ("make", "python", "python3", "pip", "vllm", "docker", "git", "cd", "mkdir", "curl")
# What a person fills in.
PLACEHOLDER = re.compile(r"\.\.\.|^[A-Z_]+$|<\w+>")


class Wrong(Exception):
    """A command that does not work as it is written."""


def commands(text: str) -> Iterator[str]:
    """Those in `sh` blocks, and those in the text that look like one."""
    for block in re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, re.M | re.S):
        yield from re.sub(r"\\\n\s*", "", block).strip().splitlines()
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", prose):
        program, _, rest = " ".join(span.split()).partition(" ")
        if rest and (program in PROGRAMS or program.startswith(("build/", "deploy/"))):
            yield f"{program} {rest}"


def commands_in_comments(text: str) -> list[str]:
    return re.findall(
        r"^# .*?((?:docker|python|deploy/|[A-Z]+=)\S* .*?)(?:   .*)?$", text, re.M
    )


def parts(command: str) -> Iterator[list[str]]:
    """The words of each simple command; of a pipe, only the first counts."""
    for inner in re.findall(r"\$\((.*?)\)", command):
        yield from parts(inner)
    outer = re.sub(r"\$\(.*?\)", "VALUE", command)
    for simple in re.split(r"&&|;", outer):
        words = shlex.split(simple.partition("|")[0], comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


def check(command: str) -> None:
    """Raises Wrong where a command would fail for what is written in it."""
    for program, *arguments in parts(command):
        if program == "make":
            _check_make(arguments)
        elif program.startswith("build/") and program.endswith("/bin/python"):
            if program.split("/")[1:2] == ["env"]:
                _expect((ROOT / "patches" / program.split("/")[2]).is_dir(), program)
            _check_python(arguments)
        elif program in ("python", "python3"):
            _check_python(arguments)
        elif program == "vllm":
            _check_vllm(arguments)
        elif program.startswith("deploy/"):
            _expect(os.access(ROOT / program, os.X_OK), f"{program} cannot be run")
        elif program in PROGRAMS:
            for word in arguments:
                if word.startswith(("deploy/", "patches/", "upstream/")) and "<" not in word:
                    _expect((ROOT / word).exists(), f"{word} is missing")
        else:
            raise Wrong(f"{program} is no program that this test knows")


def _expect(holds: object, text: str) -> None:
    if not holds:
        raise Wrong(text)


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    for word in arguments:
        name, assigns, value = word.partition("=")
        if assigns:
            _expect(f"$({name})" in makefile, f"make has no setting {name}")
            known = name != "PIN" or PLACEHOLDER.search(value)
            _expect(known or (ROOT / "patches" / value).is_dir(), f"there is no pin {value}")
        elif not word.startswith("-"):
            _expect(word in targets, f"make has no target {word}")


def _check_python(arguments: list[str]) -> None:
    if arguments[:1] != ["-m"]:
        script, *rest = arguments
        if script.endswith("-installer.pyz"):
            _expect(rest and rest[0] in ("check", "install", "verify", "remove"), f"{rest}")
        else:
            _expect((ROOT / script).is_file(), f"{script} is missing")
        return
    _, module, *rest = arguments
    parsers = {
        "scripts.plan_capacity": plan_capacity._parser,
        "scripts.verify_server": verify_server._parser,
    }
    if module == "pytest":
        for word in rest:
            path = word.partition("::")[0]
            _expect(word.startswith("-") or (ROOT / path).exists(), f"{path} is missing")
    elif module in parsers and rest:  # else it is only named
        try:
            parsers[module]().parse_args(rest)
        except SystemExit:
            raise Wrong(f"python -m {module} refuses {shlex.join(rest)}") from None
    else:
        path = ROOT.joinpath(*module.split("."))
        _expect(path.with_suffix(".py").is_file() or path.is_dir(), f"no module {module}")
        for word in rest:
            option = word.partition("=")[0]
            known = not word.startswith("--") or re.search(rf"{option}\b", _sources(path))
            _expect(known, f"python -m {module} has no {option}")


@cache
def _sources(path: Path) -> str:
    files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return "".join(file.read_text() for file in files)


def _check_vllm(arguments: list[str]) -> None:
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # v0.19.1
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if arguments == ["--version"]:
        return
    command, *rest = arguments
    _expect(command == "serve", f"vllm {command} is not in the docs")
    rest = [word for word in rest if not PLACEHOLDER.fullmatch(word)]
    try:
        make_arg_parser(FlexibleArgumentParser()).parse_args(rest)
    except SystemExit:
        raise Wrong(f"vllm serve refuses {shlex.join(rest)}") from None


FOUND = {
    f"{path.relative_to(ROOT)}: {command}": command
    for paths, of in ((PAGES, commands), (EXAMPLES, commands_in_comments))
    for path in paths
    for command in of(path.read_text())
    if not command.startswith("#")
}


@pytest.mark.parametrize("command", FOUND.values(), ids=FOUND)
def test_command(command):
    check(command)


def test_there_are_commands():
    assert len(FOUND) > 40
    assert "make apply build" in FOUND.values()


@pytest.mark.parametrize(
    "command",
    sorted({command for command in FOUND.values() if "scripts.plan_capacity " in command}),
)
def test_the_planner_answers(command, capsys):
    """With the vLLM of this Python."""
    arguments = shlex.split(command.partition("scripts.plan_capacity")[2], comments=True)
    assert plan_capacity.main([*arguments, "--pin", ""]) == 0
    assert "--kv-offloading-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("make patched build", "no target patched"),
        ("make image BSAE=x", "no setting BSAE"),
        ("make apply PIN=v0.19.2", "no pin v0.19.2"),
        ("make check bisect && make tset", "no target tset"),
        ('pip install "$(make -s wheer | sed -n 1p)"', "no target wheer"),
        ("python -m scripts.plan_capacity 31b --tpp 2", "refuses 31b --tpp 2"),
        ("python -m scripts.verify_server --ulr http://x", "refuses --ulr"),
        ("build/env/v0.20.0/bin/python -m tests.engine", "v0.20.0"),
        ("build/env/v0.33.0/bin/python -m tests.engine --sead 1", "has no --sead"),
        ("python -m tests.servers", "no module tests.servers"),
        ("python -m pytest tests/histories/test_stok.py", "test_stok.py is missing"),
        ("python vllm-0.19.1+gemma4kv.1-installer.pyz undo", "undo"),
        ("deploy/docker.sh", "cannot be run"),
        ("docker compose -f deploy/compos.yaml up", "compos.yaml is missing"),
        ("vllm serve MODEL --kv-offload-size 8", "vllm serve refuses"),
        ("frobnicate --now", "no program that this test knows"),
    ],
)
def test_a_wrong_command_is_found(command, complaint):
    with pytest.raises(Wrong, match=complaint):
        check(command)


# --- links ---


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, folder: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        page = folder / path if path else None
        missing = page and not page.exists()
        if missing or (anchor and page and anchor not in anchors(page)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    assert not broken_links(page.read_text(), page.parent)


def test_a_wrong_link_is_found():
    text = "[a](docs/sizing.md#what-takes-memory) [b](docs/size.md) [c](docs/sizing.md#memory)"
    assert broken_links(text, ROOT) == ["docs/size.md", "docs/sizing.md#memory"]
