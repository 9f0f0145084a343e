"""`make submit FIX=id`: the pull request, checked, and not sent."""

import pytest
from conftest import git
from proposals import TEMPLATE, commit_patch, make_series, release, write_table

from scripts import checkout
from scripts.shell import Failure
from scripts.submit import _said_of, submit

NO_HOOKS = "repos: []\n"
NO_TABS = """\
repos:
- repo: local
  hooks:
  - {id: no-bad-word, name: no bad word, language: pygrep, entry: terrible}
"""


@pytest.fixture
def project(upstream):
    release(
        upstream,
        {".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE, ".pre-commit-config.yaml": NO_TABS},
    )
    make_series(upstream)
    return upstream


def printed(project, capsys, fix):
    capsys.readouterr()
    submit(fix, project.load())
    return capsys.readouterr().out


def test_what_it_prints(project, capsys):
    text = printed(project, capsys, "third")
    parts = [
        "gh search prs --repo vllm-project/vllm -- 'third words'",
        "==== v1.0.0/0003-Feature-Third.patch\n",
        "ok     applies to the release alone",
        "ok     message",
        "ok     size: 1 product, 1 test, 0 doc lines",
        "ok     tests: tests/test_third.py",
        "ok     vLLM's lint",
        "---- title\n[Feature] Third\n---- description\n",
        "## Overview\n\nSymptom, root cause and cure",
        "## Claims\n\n- A cure.",
        "all pass with it:\n`test_x`.\n\n```sh\npytest tests/test_third.py",
        "**Request flow**\n\n1. A request.\n\n**Limits**\n\nNone.",
        "**Review**\n\n<!-- TO DO, by hand: your statement. -->",
        "- [x] AI assistance was used",
        "What only a person can do:",
        "write `review` of [third]",
        "--signoff",
        "Nothing was sent.",
    ]
    places = [text.find(part) for part in parts]
    assert -1 not in places, parts[places.index(-1)]
    assert places == sorted(places)
    assert "<!-- What. -->" not in text


def test_a_fix_of_two_patches_that_build_on_each_other(project, capsys):
    text = printed(project, capsys, "both")
    first, second = text.split("==== ")[1:]
    assert first.startswith("v1.0.0/0001-Bugfix-Core-First.patch, part 1 of 2")
    assert "applies to the release alone" in first
    assert "note   applies after:\n       0001-Bugfix-Core-First.patch" in second
    assert "**Builds on**\n\n- [Bugfix][Core] First\n" in second
    assert "## Claims\n\nAll 2 parts of this fix together; this is one of them.\n" in second


def test_a_patch_needs_no_more_than_it_builds_on(project, capsys):
    """Not what merely touches the same file elsewhere."""
    path = project.load().checkout / "vllm/engine.py"
    commit_patch(
        project,
        "[Bugfix][Core] Fourth",
        {
            "vllm/engine.py": path.read_text().replace("line_30 = 30", "line_30 = 31"),
            "tests/test_second.py": "def test_second(): ...\ndef test_fourth(): ...\n",
        },
    )
    checkout.export(project.load())
    table = project.root / "upstream" / "fixes.toml"
    table.write_text(
        table.read_text().replace("patches = []", 'patches = ["[Bugfix][Core] Fourth"]')
    )
    text = printed(project, capsys, "planned")
    needs = "       0001-Bugfix-Core-First.patch\n       0002-Bugfix-Core-Second.patch\n"
    assert f"note   applies after:\n{needs}ok" in text
    assert "0003-Feature-Third.patch\n" not in text.partition("---- title")[0]


def test_a_review_is_put_in(project, capsys):
    table = project.root / "upstream" / "fixes.toml"
    table.write_text(
        table.read_text().replace(
            'title = "Fix of third"', 'title = "Fix of third"\nreview = "I read it."'
        )
    )
    text = printed(project, capsys, "third")
    assert "**Review**\n\nI read it." in text
    assert "still what you say" in text


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ("nonsense", "FIX=nonsense is not known; choose from both, third"),
        ("elsewhere", "v1.0.0 does not need elsewhere: engine.py does it"),
        ("planned", "planned has no patch for v1.0.0 yet"),
    ],
)
def test_nothing_to_submit(project, fix, message):
    with pytest.raises(Failure, match=message):
        submit(fix, project.load())


def test_submitted_already(project):
    table = project.root / "upstream" / "fixes.toml"
    text = table.read_text()
    head, tail = text[: text.index("[third]")], text[text.index("[third]") :]
    address = "https://github.com/vllm-project/vllm/pull/1"
    new = f'state = "submitted"\npull_request = "{address}"'
    table.write_text(head + tail.replace('state = "pending"', new, 1))
    with pytest.raises(Failure, match=address):
        submit("third", project.load())


def test_what_is_wrong_is_said_at_its_place_and_at_the_end(project, capsys):
    folder = project.load().checkout
    (folder / "vllm/large.py").write_text("x = 'terrible'\n" * 501)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Large\n\nNo tags, no reason.")
    checkout.export(project.load())
    table = project.root / "upstream" / "fixes.toml"
    table.write_text(table.read_text().replace("patches = []", 'patches = ["Large"]'))
    with pytest.raises(Failure, match="not ready to be submitted") as error:
        submit("planned", project.load())
    text = capsys.readouterr().out
    for problem in (
        "expected `[Tag][Tag] Title`",
        "the message must explain",
        "more than 500 product lines want an RFC first",
        "it has none",
        "vLLM's lint complains",
    ):
        assert problem in text
        assert problem in str(error.value)


def test_a_page_is_wanted(project):
    page = project.root / "docs" / "fixes" / "third.md"
    page.write_text(page.read_text().replace("## Limits", "## Borders"))
    with pytest.raises(Failure, match=r"third\.md: no section Limits"):
        submit("third", project.load())
    page.unlink()
    with pytest.raises(Failure, match=r"third\.md is missing"):
        submit("third", project.load())


def test_a_patch_that_no_fix_has(project):
    write_table(project, {"third": {"state": "pending", "patches": ["[Feature] Third"]}})
    with pytest.raises(Failure, match="0001-Bugfix-Core-First.patch belongs to no fix"):
        submit("third", project.load())


def test_a_template_that_has_changed(upstream):
    release(
        upstream,
        {
            ".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE.replace("## Claims", "## Gains"),
            ".pre-commit-config.yaml": NO_HOOKS,
        },
    )
    make_series(upstream)
    with pytest.raises(Failure, match="no `## Claims` any more"):
        submit("third", upstream.load())


def test_a_description_is_of_one_pin():
    text = """\
- For all, see [elsewhere](elsewhere.md).
- v0.19.1: not for
  vLLM.
- v1.0.0: only here ([more](more.md)).

v0.19.1 has more.

v1.0.0 has it."""
    assert _said_of("v1.0.0", text) == (
        "- For all, see elsewhere.\n- Only here.\nv1.0.0 has it."
    )


def test_steps_are_numbered_anew():
    steps = "1. One.\n2. v0.19.1 does\n   this.\n3. Three."
    assert _said_of("v1.0.0", steps) == "1. One.\n2. Three."
