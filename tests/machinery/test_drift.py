"""`make drift`: patch by patch, what a newer source still needs."""

import hashlib
import tarfile

import pytest
from conftest import FILES, git, write_sdist
from proposals import copy_release, engine, make_series

from scripts.drift import CONFLICT, NEEDED, PARTLY, THERE, drift
from scripts.shell import Failure


@pytest.fixture
def project(upstream):
    make_series(upstream)
    return upstream


def digest(folder):
    """Everything in a folder, git's own files included, but for times and the index."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "index" and "objects" not in path.parts:
            whole.update(str(path).encode() + path.read_bytes())
    return whole.hexdigest()


def verdicts(project, source):
    return [verdict.kind for verdict in drift(project.load(), source)]


def test_the_release_itself_needs_all(project, tmp_path):
    assert verdicts(project, copy_release(project, tmp_path / "new", {})) == [NEEDED] * 3


def test_a_source_that_has_one(project, tmp_path, capsys):
    source = copy_release(
        project,
        tmp_path / "new",
        {
            "vllm/third.py": "third_has_come = True\n",
            "tests/test_third.py": "def test_x(): ...\n",
        },
    )
    assert verdicts(project, source) == [NEEDED, NEEDED, THERE]
    printed = capsys.readouterr().out
    assert "already there  0003-Feature-Third.patch (third)" in printed
    assert "2 still needed, 0 partly there, 1 already there, 0 conflicts" in printed


def test_a_source_that_has_all(project):
    """The first patch's line has been changed again since, and its test is there."""
    kinds = verdicts(project, project.load().checkout)
    assert kinds == [CONFLICT, THERE, THERE]


def test_what_later_changes_built_upon_is_there(project, tmp_path):
    new = {5: "first_change_of_line_5 = True", 6: "something_else = True"}
    source = copy_release(
        project,
        tmp_path / "new",
        {
            "vllm/engine.py": engine(new),
            "tests/test_first.py": "def test_first(): ...\nX = 1\n",
        },
    )
    assert verdicts(project, source)[0] == THERE


def test_a_test_that_is_there_without_its_fix(project, tmp_path):
    source = copy_release(
        project, tmp_path / "new", {"tests/test_third.py": "def test_x(): ...\n"}
    )
    assert verdicts(project, source) == [NEEDED, NEEDED, PARTLY]


def test_conflicts_are_named_and_the_rest_goes_on(project, tmp_path, capsys):
    changed = {5: "upstream_has_another_idea = True"}
    source = copy_release(project, tmp_path / "new", {"vllm/engine.py": engine(changed)})
    assert verdicts(project, source) == [CONFLICT, CONFLICT, NEEDED]
    printed = capsys.readouterr().out
    assert "(both): vllm/engine.py (0 of 2 added lines are there)" in printed
    assert "here without 0001" in printed


def test_a_file_that_is_gone(project, tmp_path, capsys):
    source = copy_release(project, tmp_path / "new", {"vllm/engine.py": None})
    assert verdicts(project, source) == [CONFLICT, CONFLICT, NEEDED]
    assert "vllm/engine.py is gone" in capsys.readouterr().out


def test_a_source_distribution(project, tmp_path):
    archive = write_sdist(tmp_path / "vllm-2.0.0.tar.gz", FILES | {"vllm/new.py": "NEW = 1\n"})
    assert verdicts(project, archive) == [NEEDED] * 3


def test_a_clone_is_taken_at_its_commit(project):
    git(project.repository, "checkout", "--quiet", "main")
    (project.repository / "vllm/engine.py").write_text("not committed\n")
    assert verdicts(project, project.repository) == [NEEDED] * 3


def test_nothing_changes(project, tmp_path):
    checkout = project.load().checkout
    (checkout / "vllm/engine.py").write_text("an edit that nobody may touch\n")
    source = copy_release(project, tmp_path / "new", {"vllm/engine.py": None})
    before = digest(project.root), digest(source)
    drift(project.load(), source)
    assert (digest(project.root), digest(source)) == before
    assert [path.name for path in (project.root / "build").iterdir()] == ["src"]


@pytest.mark.parametrize("kind", ["missing", "text", "empty", "foreign"])
def test_what_is_no_source_is_refused(project, tmp_path, kind):
    source = tmp_path / "new"
    if kind == "text":
        source.write_text("no archive")
    elif kind == "empty":
        source.mkdir()
        (source / "README.md").write_text("nothing\n")
    elif kind == "foreign":
        with tarfile.open(source, "w:gz") as tar:
            tar.add(project.root / "upstream", "other-1.0/upstream")
    with pytest.raises(Failure, match="is no (folder|source)"):
        drift(project.load(), source)
