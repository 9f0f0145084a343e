"""`make apply`: the same content from every source, and never a half state."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FILES, TAG, git

from scripts import checkout, downloads, series
from scripts.shell import Failure


def tree_of(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD^{tree}")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


@pytest.fixture
def applied(upstream):
    """A checkout with a series of two patches, recorded in the pin."""
    checkout.apply(upstream.load())
    upstream.commit_in_checkout("vllm/config.py", "SETTING = 7\n", "[Bugfix] First")
    upstream.commit_in_checkout("vllm/new.py", "NEW = True\n", "[Feature] Second")
    checkout.export(upstream.load())
    return upstream


def forget_checkout(upstream) -> None:
    subprocess.run(["rm", "-rf", str(upstream.load().checkout)], check=True)


def test_sdist_when_no_repository_answers(upstream, capsys):
    checkout.apply(upstream.load())
    assert "source: vllm-1.0.0.tar.gz (git repository not reachable)" in capsys.readouterr().out
    # Not one of the files that packaging generates, and none hidden by .gitignore lost.
    assert sorted(snapshot(upstream.load().checkout)) == sorted(FILES)


@pytest.mark.parametrize("named_by", ["pin", "user"])
def test_a_clone_gives_the_same_commit_as_the_sdist(upstream, capsys, monkeypatch, named_by):
    checkout.apply(upstream.load())
    from_sdist = git(upstream.load().checkout, "rev-parse", "HEAD")
    forget_checkout(upstream)
    if named_by == "pin":
        upstream.let_repository_answer()
    else:
        monkeypatch.setenv("VLLM_REPO", str(upstream.repository))
    capsys.readouterr()
    checkout.apply(upstream.load())
    assert f"source: {TAG} from {upstream.repository}" in capsys.readouterr().out
    assert git(upstream.load().checkout, "rev-parse", "HEAD") == from_sdist


def test_a_commit_prefix_is_enough(upstream, monkeypatch):
    upstream.edit_pin(upstream.commit, upstream.commit[:9])
    monkeypatch.setenv("VLLM_REPO", str(upstream.repository))
    checkout.apply(upstream.load())


def test_a_tag_on_another_commit_is_refused(upstream, monkeypatch):
    monkeypatch.setenv("VLLM_REPO", str(upstream.repository))
    git(upstream.repository, "tag", "--force", TAG, "main")
    with pytest.raises(Failure, match=f"the pin says {upstream.commit}"):
        checkout.apply(upstream.load())
    assert not upstream.load().checkout.exists()


def test_a_moved_tag_is_refused_and_not_replaced_by_the_sdist(upstream):
    upstream.let_repository_answer()
    git(upstream.repository, "tag", "--force", TAG, "main")
    with pytest.raises(Failure, match="the pin says"):
        checkout.apply(upstream.load())


def test_a_named_clone_without_the_tag_is_an_error(upstream, monkeypatch):
    monkeypatch.setenv("VLLM_REPO", str(upstream.repository))
    git(upstream.repository, "tag", "--delete", TAG)
    with pytest.raises(Failure, match=f"has no tag {TAG}"):
        checkout.apply(upstream.load())


def test_another_source_is_checked_by_the_files_the_series_touches(
    applied, capsys, monkeypatch
):
    """A clone may differ from the sdist, but not where it matters."""
    monkeypatch.setenv("VLLM_REPO", str(applied.repository))
    for path, refused in (("README.md", False), ("vllm/config.py", True)):
        forget_checkout(applied)
        git(applied.repository, "checkout", "--quiet", applied.commit)
        content = (applied.repository / path).read_text()
        (applied.repository / path).write_text(content + "# a comment far away\n" * 9)
        git(applied.repository, "commit", "--quiet", "--all", "--message", "Another release")
        git(applied.repository, "tag", "--force", TAG)
        pinned = applied.load().commit
        applied.edit_pin(pinned, git(applied.repository, "rev-parse", "HEAD"))
        if refused:
            with pytest.raises(Failure, match="vllm/config.py"):
                checkout.apply(applied.load())
        else:
            checkout.apply(applied.load())
            assert "not the recorded one" in capsys.readouterr().out


def test_again_changes_nothing_and_says_so(applied, capsys):
    folder = applied.load().checkout
    before = git(folder, "rev-parse", "HEAD"), snapshot(folder)
    capsys.readouterr()
    checkout.apply(applied.load())
    assert "already applied (2 patches); nothing to do" in capsys.readouterr().out
    assert (git(folder, "rev-parse", "HEAD"), snapshot(folder)) == before


def test_commit_ids_do_not_depend_on_who_applies(applied, monkeypatch, tmp_path):
    forget_checkout(applied)
    checkout.apply(applied.load())
    first = git(applied.load().checkout, "rev-parse", "HEAD")
    forget_checkout(applied)
    (tmp_path / "gitconfig").write_text(
        "[user]\nname = X\nemail = x@x\n[core]\nautocrlf = true\n[commit]\ngpgSign = true\n"
        "[diff]\nnoprefix = true\nalgorithm = histogram\n[am]\nthreeWay = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_COMMITTER_NAME", "Y")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    checkout.apply(applied.load())
    assert git(applied.load().checkout, "rev-parse", "HEAD") == first
    monkeypatch.delenv("GIT_CONFIG_GLOBAL")


@pytest.mark.parametrize("edit", ["changed", "staged", "untracked"])
def test_local_edits_are_named_and_kept(applied, edit):
    folder = applied.load().checkout
    path = "mine.py" if edit == "untracked" else "vllm/engine.py"
    (folder / path).write_text("precious\n")
    if edit == "staged":
        git(folder, "add", path)
    for command in (checkout.apply, checkout.export):
        with pytest.raises(Failure, match=f"local edits.*\n.*{path}"):
            command(applied.load())
    assert (folder / path).read_text() == "precious\n"


def test_local_commits_are_named_and_kept(applied):
    applied.commit_in_checkout("vllm/mine.py", "precious\n", "[Core] Mine")
    # Somebody else's series arrives meanwhile.
    drop_last_patch(applied)
    with pytest.raises(Failure, match=r"not in patches/ (?s:.*)\[Core\] Mine"):
        checkout.apply(applied.load())
    assert (applied.load().checkout / "vllm/mine.py").read_text() == "precious\n"


def test_an_unfinished_rebase_is_left_alone(applied):
    folder = applied.load().checkout
    applied.commit_in_checkout("vllm/config.py", "SETTING = 8\n", "[Core] Third")
    rebase = subprocess.run(
        ["git", "-C", str(folder), "rebase", "--onto", "HEAD~2", "HEAD~1"], capture_output=True
    )
    assert rebase.returncode == 0 or (folder / ".git/rebase-merge").exists()
    (folder / ".git/rebase-merge").mkdir(exist_ok=True)
    with pytest.raises(Failure, match="in the middle of a rebase"):
        checkout.apply(applied.load())


def drop_last_patch(upstream) -> None:
    """The series as it was one patch ago, pin included."""
    pin = upstream.load()
    patches = series.read(pin.series)
    patches.popitem()
    series.write(pin.series, patches)
    pin.record_trees(pin.base_tree, git(pin.checkout, "rev-parse", "refs/series/head~1^{tree}"))


def test_a_changed_series_replaces_the_old_one(applied, capsys):
    drop_last_patch(applied)
    checkout.apply(applied.load())
    assert "1 patches applied" in capsys.readouterr().out
    assert not (applied.load().checkout / "vllm/new.py").exists()
    assert (applied.load().checkout / "vllm/config.py").read_text() == "SETTING = 7\n"


def test_a_series_and_pin_that_do_not_belong_together(applied):
    patches = series.read(applied.load().series)
    patches.popitem()
    series.write(applied.load().series, patches)
    before = git(applied.load().checkout, "rev-parse", "HEAD")
    with pytest.raises(Failure, match="patches/ and the pin's file do not belong together"):
        checkout.apply(applied.load())
    assert git(applied.load().checkout, "rev-parse", "HEAD") == before
    forget_checkout(applied)
    with pytest.raises(Failure, match="do not belong together"):
        checkout.apply(applied.load())
    assert not applied.load().checkout.exists()


def break_first_patch(upstream) -> str:
    pin = upstream.load()
    patches = series.read(pin.series)
    name = next(iter(patches))
    patches[name] = patches[name].replace(b"-SETTING = 1", b"-SETTING = 0")
    series.write(pin.series, patches)
    return name


@pytest.mark.parametrize("fresh", [True, False])
def test_a_conflict_names_patch_file_and_hunk_and_leaves_nothing(applied, fresh):
    if fresh:
        forget_checkout(applied)
    else:
        before = git(applied.load().checkout, "rev-parse", "HEAD")
    name = break_first_patch(applied)
    with pytest.raises(Failure) as error:
        checkout.apply(applied.load())
    text = str(error.value)
    assert f"{name} (patch 1 of 2) does not apply" in text
    assert "vllm/config.py:1" in text
    assert "SETTING = 0" in text
    assert f"make apply PIN={TAG} RESOLVE=1" in text
    if fresh:
        assert list((applied.root / "build/src").iterdir()) == []
    else:
        assert git(applied.load().checkout, "rev-parse", "HEAD") == before
        assert git(applied.load().checkout, "status", "--porcelain") == ""
        assert git(applied.load().checkout, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize("fresh", [True, False])
def test_a_conflict_can_be_resolved_in_the_checkout_and_exported(applied, fresh):
    if fresh:
        forget_checkout(applied)
    name = break_first_patch(applied)
    with pytest.raises(Failure, match=f"(?s){name} conflicts.*git am --continue"):
        checkout.apply(applied.load(), resolve=True)
    folder = applied.load().checkout
    with pytest.raises(Failure, match="in the middle of a rebase, am"):
        checkout.apply(applied.load())
    (folder / "vllm/config.py").write_text("SETTING = 9\n")
    git(folder, "add", "--all")
    git(folder, "am", "--continue")
    checkout.export(applied.load())
    assert len(series.read(applied.load().series)) == 2
    forget_checkout(applied)
    checkout.apply(applied.load())
    assert (folder / "vllm/config.py").read_text() == "SETTING = 9\n"


def test_a_wrong_hash_keeps_nothing(upstream):
    good = upstream.load().sdist.sha256
    upstream.edit_pin(good, "0" * 64)
    with pytest.raises(Failure, match=f"(?s)vllm-1.0.0.tar.gz.*{good}.*the pin says 0000"):
        checkout.apply(upstream.load())
    assert not [path for path in downloads.cache_folder().rglob("*") if path.is_file()]
    assert not upstream.load().checkout.exists()
    upstream.edit_pin("0" * 64, good)
    checkout.apply(upstream.load())


def test_no_network_says_what_to_do_and_the_next_run_recovers(upstream, monkeypatch):
    index = os.environ["PIP_INDEX_URL"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    with pytest.raises(
        Failure, match="the download failed.*set PIP_INDEX_URL.*copy the file to"
    ):
        checkout.apply(upstream.load())
    monkeypatch.setenv("PIP_INDEX_URL", index)
    checkout.apply(upstream.load())


def test_a_file_in_the_cache_needs_no_network(upstream, monkeypatch):
    checkout.apply(upstream.load())
    forget_checkout(upstream)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    checkout.apply(upstream.load())


def test_a_damaged_file_in_the_cache_is_fetched_again(upstream):
    path = downloads.fetch(upstream.load().sdist)
    path.write_bytes(path.read_bytes()[:100])
    checkout.apply(upstream.load())


def test_an_index_without_the_file(upstream):
    (upstream.index / "vllm" / "vllm-1.0.0.tar.gz").unlink()
    with pytest.raises(Failure, match="the package index has no vllm-1.0.0.tar.gz"):
        checkout.apply(upstream.load())


def test_killed_while_the_checkout_is_made(upstream):
    """A first run that dies anywhere leaves what the next one can deal with."""
    kill_inside(upstream, "series.apply")
    assert not upstream.load().checkout.exists()
    checkout.apply(upstream.load())
    assert sorted(snapshot(upstream.load().checkout)) == sorted(FILES)


def test_killed_while_the_checkout_moves_to_a_new_series(applied, capsys):
    drop_last_patch(applied)
    # Some files already belong to the new series, HEAD still to the old one.
    kill_inside(applied, "_move_half")
    assert git(applied.load().checkout, "status", "--porcelain") != ""
    checkout.apply(applied.load())
    assert "an earlier run was interrupted; finishing it" in capsys.readouterr().out
    assert git(applied.load().checkout, "status", "--porcelain") == ""
    assert not (applied.load().checkout / "vllm/new.py").exists()


# A file that the move takes away, and one that it leaves as it is.
@pytest.mark.parametrize("name", ["new.py", "engine.py"])
def test_edits_after_an_interrupted_move_are_kept(applied, name):
    drop_last_patch(applied)
    kill_inside(applied, "_move_half")
    mine = applied.load().checkout / "vllm" / name
    mine.write_text("precious\n")
    with pytest.raises(Failure, match=f"{name} was edited after an interrupted"):
        checkout.apply(applied.load())
    assert mine.read_text() == "precious\n"


def kill_inside(upstream, where: str) -> None:
    """Run apply in another process, which kills itself at a given place."""
    code = f"""
import os, signal
from pathlib import Path
from scripts import checkout, pins, series
from scripts.git import Git
def die(*arguments, **options):
    os.kill(os.getpid(), signal.SIGKILL)
if {where!r} == "series.apply":
    series.apply = die
else:
    original = Git.__call__
    def call(self, *arguments, **options):
        if arguments[:3] == ("reset", "--quiet", "--keep"):
            (self.folder / "vllm/new.py").unlink()
            (self.folder / ".git/index.lock").touch()
            die()
        return original(self, *arguments, **options)
    Git.__call__ = call
checkout.apply(pins.load({TAG!r}, Path({str(upstream.root)!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


def test_commits_after_an_interrupted_move_are_kept(applied):
    drop_last_patch(applied)
    kill_inside(applied, "_move_half")
    folder = applied.load().checkout
    (folder / ".git/index.lock").unlink()
    git(folder, "checkout", "--quiet", ".")
    applied.commit_in_checkout("vllm/mine.py", "", "[Core] Mine")
    mine = git(folder, "rev-parse", "HEAD")
    with pytest.raises(Failure, match="commits made after an interrupted"):
        checkout.apply(applied.load())
    assert git(folder, "rev-parse", "HEAD") == mine


def test_a_dropped_commit_is_not_put_back_in_silence(applied):
    git(applied.load().checkout, "reset", "--quiet", "--hard", "HEAD~1")
    with pytest.raises(Failure, match=r"lacks some \(<\)"):
        checkout.apply(applied.load())


def test_a_missing_series_file_is_named(applied):
    (applied.load().series / "series").unlink()
    with pytest.raises(Failure, match="series is missing"):
        checkout.apply(applied.load())


def test_an_empty_patch_file_is_named(applied):
    names = list(series.read(applied.load().series))
    (applied.load().series / names[-1]).write_bytes(b"")
    forget_checkout(applied)
    with pytest.raises(Failure, match="git cannot read the series|does not apply"):
        checkout.apply(applied.load())


def test_a_folder_that_is_not_ours_is_left_alone(upstream):
    folder = upstream.load().checkout
    folder.mkdir(parents=True)
    (folder / "precious").write_text("")
    with pytest.raises(Failure, match="was not made by `make apply`"):
        checkout.apply(upstream.load())
    assert (folder / "precious").exists()


def test_a_series_that_names_a_missing_patch(applied):
    (applied.load().series / "series").write_text("0001-not-there.patch\n")
    with pytest.raises(Failure, match="names 0001-not-there.patch, which is not there"):
        checkout.apply(applied.load())
