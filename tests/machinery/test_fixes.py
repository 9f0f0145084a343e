"""The table of fixes and their pages."""

import re

import pytest

from scripts import fixes, pins, series
from scripts.shell import Failure
from scripts.submit import read_page

TABLE = fixes.load()
_LONGEST_PAGE = 80


@pytest.mark.parametrize("tag", pins.tags())
def test_every_patch_belongs_to_exactly_one_fix(tag):
    pin = pins.load(tag)
    assert fixes.by_patch(pin, TABLE).keys() == series.read(pin.series).keys()


def test_every_page_is_of_a_fix():
    folder = pins.ROOT / "docs" / "fixes"
    assert {path.stem for path in folder.glob("*.md")} == {"README", *TABLE}


@pytest.mark.parametrize("fix", TABLE.values(), ids=TABLE)
def test_page(fix):
    text = fix.page().read_text()
    assert text.startswith(f"# {fix.title}\n")
    assert text.count("\n") <= _LONGEST_PAGE
    assert re.findall("^## (.*)", text, re.M) == [
        "Symptom", "Root cause", "Request flow", "Fix", "Evidence", "Limits",
    ]  # fmt: skip
    flow = re.findall(r"^(\d)\. ", read_page(fix.page())["Request flow"], re.M)
    assert flow == [str(number) for number in range(1, len(flow) + 1)]
    assert len(flow) >= 3


@pytest.mark.parametrize("fix", TABLE.values(), ids=TABLE)
def test_evidence_names_tests_that_exist(fix):
    patches = b"".join(
        content
        for tag in pins.tags()
        for name, content in series.read(pins.load(tag).series).items()
        if fixes.subject(content) in fix.pins[tag].patches
    ).decode()
    known = set(re.findall(r"^\+(?:async )?def (test_\w+)", patches, re.M))
    files = set(re.findall(r"^\+\+\+ b/(tests/\S+)", patches, re.M))
    for path in pins.ROOT.glob("tests/*/test_*.py"):
        files.add(str(path.relative_to(pins.ROOT)))
        known |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
    evidence = read_page(fix.page())["Evidence"]
    named = set(re.findall(r"`(test_\w+)`", evidence))
    assert named, "a page names the tests that show the fix"
    assert named <= known
    assert set(re.findall(r"`(tests/\S+\.py)`", evidence)) <= files


def test_links_lead_somewhere():
    for path in (pins.ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


GOOD = '[one]\ntitle = "One"\nsearches = ["one"]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[one]\ntitle = "One"\n', "one needs a title and searches"),
        (GOOD + '[one."v1.0.0"]\nstate = "done"', "state is one of pending, submitted"),
        (GOOD + '[one."v1.0.0"]\nstate = "not needed"', "needs a note that shows it"),
        (
            GOOD + '[one."v1.0.0"]\nstate = "not needed"\nnote = "x"\npatches = ["[A] B"]',
            "has patches, so it is needed",
        ),
        (GOOD + '[one."v1.0.0"]\nstate = "submitted"', "a pull_request goes with"),
        (GOOD + '[one."v1.0.0"]\nstate = "pending"\npatch = ["x"]', "unknown patch"),
        ("[one", "not valid TOML"),
    ],
)
def test_senseless_entries_are_refused(tmp_path, text, message):
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream" / "fixes.toml").write_text(text)
    with pytest.raises(Failure, match=message):
        fixes.load(tmp_path)


def test_a_table_is_wanted(tmp_path):
    with pytest.raises(Failure, match=r"fixes\.toml is missing"):
        fixes.load(tmp_path)
