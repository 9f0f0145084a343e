"""`make export` and the round trip of `make check`."""

import re

import pytest
from conftest import git

from scripts import checkout, checks, series
from scripts.shell import Failure


@pytest.fixture
def applied(upstream):
    checkout.apply(upstream.load())
    upstream.commit_in_checkout("vllm/config.py", "SETTING = 7\n", "[Bugfix][KV Offload] First")
    upstream.commit_in_checkout("vllm/new.py", "NEW = True\n", "[Feature] Second")
    checkout.export(upstream.load())
    return upstream


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def round_trip(pin):
    with checkout.scratch_worktree(checkout.open_checkout(pin), checkout.BASE) as tree:
        checks.round_trip(pin, tree)


def test_unchanged_means_the_same_bytes(applied, capsys):
    before = files(applied.load().series), applied.load().file.read_bytes()
    capsys.readouterr()
    checkout.export(applied.load())
    assert capsys.readouterr().out == "v1.0.0: 2 patches, unchanged\n"
    assert (files(applied.load().series), applied.load().file.read_bytes()) == before
    round_trip(applied.load())


def test_tags_in_the_subject_and_the_authors_date_survive(applied):
    first = next(iter(series.read(applied.load().series).values()))
    assert b"\nSubject: [Bugfix][KV Offload] First\n" in first
    assert b"\nFrom: Somebody <somebody@example.org>\n" in first
    assert first.startswith(b"From " + b"0" * 40)


def test_a_reworded_and_shortened_series_leaves_no_old_file(applied, capsys):
    folder = applied.load().checkout
    git(folder, "reset", "--quiet", "--hard", "HEAD~1")
    git(folder, "commit", "--quiet", "--amend", "--message", "[Bugfix] Better\n\nSaid why.")
    capsys.readouterr()
    checkout.export(applied.load())
    assert sorted(files(applied.load().series)) == ["0001-Bugfix-Better.patch", "series"]
    printed = capsys.readouterr().out
    assert "1 patches written" in printed
    # The range-diff shows what differs from what was exported before.
    assert "[Bugfix] Better" in printed
    assert "[Feature] Second" in printed
    round_trip(applied.load())


def test_the_pin_learns_the_tree_and_keeps_its_comments(applied):
    pin = applied.load()
    assert pin.patched_tree == git(pin.checkout, "rev-parse", "HEAD^{tree}")
    assert pin.base_tree == git(pin.checkout, "rev-parse", "refs/series/base^{tree}")
    pin.file.write_text(f"# a comment\n{pin.file.read_text()}")
    applied.commit_in_checkout("vllm/third.py", "", "[Core] Third")
    checkout.export(applied.load())
    assert applied.load().file.read_text().startswith("# a comment\n")
    assert applied.load().patched_tree != pin.patched_tree


def test_a_merge_cannot_be_exported(applied):
    folder = applied.load().checkout
    git(folder, "checkout", "--quiet", "-b", "side", "HEAD~1")
    applied.commit_in_checkout("vllm/side.py", "", "[Core] Side")
    git(folder, "checkout", "--quiet", "series")
    git(folder, "merge", "--quiet", "--no-edit", "side")
    with pytest.raises(Failure, match="no merge commits"):
        checkout.export(applied.load())


def test_a_patch_edited_by_hand_is_found(applied):
    name, content = next(iter(series.read(applied.load().series).items()))
    edited = content.replace(b"Because it must.", b"Because it must. ")
    (applied.load().series / name).write_bytes(edited)
    with pytest.raises(Failure, match=f"other bytes for {name}"):
        round_trip(applied.load())


def test_the_round_trip_does_not_look_at_the_checkout(applied):
    (applied.load().checkout / "vllm/engine.py").write_text("edited\n")
    round_trip(applied.load())


def test_export_repairs_an_interrupted_export(applied):
    before = files(applied.load().series)
    (applied.load().series / "series").unlink()
    (applied.load().series / "0001-Half.patch").write_text("")
    checkout.export(applied.load())
    assert files(applied.load().series) == before


def test_touched_reads_names_ids_and_counts(applied):
    folder = applied.load().checkout
    git(folder, "mv", "vllm/engine.py", "vllm/motor.py")
    (folder / "vllm/config.py").unlink()
    git(folder, "commit", "--quiet", "--all", "--message", "[Core] Move\n\nindex of all")
    checkout.export(applied.load())
    patches = series.read(applied.load().series)
    *_, last = patches.values()
    by_path = {file.path: file for file in series.touched(last)}
    assert by_path["vllm/engine.py"].after is None
    assert by_path["vllm/motor.py"].after == git(folder, "rev-parse", "HEAD:vllm/motor.py")
    assert (by_path["vllm/config.py"].after, by_path["vllm/config.py"].removed) == (None, 1)
    effect = series.net_effect(patches)
    base = git(folder, "rev-parse", "refs/series/base:vllm/config.py")
    assert effect["vllm/config.py"] == (base, None)
    new = git(folder, "rev-parse", "HEAD:vllm/new.py")
    assert effect["vllm/new.py"] == (None, new)


GOOD_BODY = "Symptom: it fails. Root cause: a wrong sign. Fix: the right sign.\n" * 4


def lint(upstream, subject="[Bugfix] Title", body=GOOD_BODY, trailer="Assisted-by: a tool"):
    folder = upstream.load().checkout
    git(folder, "reset", "--quiet", "--hard", "refs/series/base")
    upstream.commit_in_checkout("vllm/config.py", "SETTING = 7\n", "x")
    git(folder, "commit", "--quiet", "--amend", "--message", f"{subject}\n\n{body}\n{trailer}")
    checkout.export(upstream.load())
    return checks.lint_series(upstream.load(), series.read(upstream.load().series))


def test_a_good_message_passes(applied):
    assert lint(applied) == []
    assert lint(applied, subject="[Bugfix][KV Connector] Title of several words") == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"subject": "No tag"}, "expected `\\[Tag\\]"),
        ({"subject": "[bugfix] Lower"}, "expected `\\[Tag\\]"),
        ({"subject": "[Bugfix] A full stop."}, "without a full stop"),
        ({"subject": "[Bugfix] " + "long " * 20 + "end"}, "at most 80"),
        ({"body": "Too short."}, "explain symptom"),
        ({"body": GOOD_BODY + "x" * 101}, "longer than 100"),
        ({"trailer": "Assisted-by: a tool\nSigned-off-by: A <a@b>"}, "person who submits"),
        ({"trailer": ""}, "use of AI"),
    ],
)
def test_a_bad_message_is_named(applied, change, complaint):
    (problem,) = lint(applied, **change)
    assert re.search(complaint, problem)


def test_stray_files_and_wrong_numbers_are_named(applied):
    folder = applied.load().series
    (folder / "0003-Left-over.patch").write_text("")
    patches = series.read(folder)
    names = list(patches)
    (folder / "series").write_text("".join(f"{name}\n" for name in reversed(names)))
    problems = checks.lint_series(applied.load(), series.read(folder))
    assert any("0003-Left-over.patch is not in the series" in text for text in problems)
    assert any(
        f"{names[1]}: expected a name that starts with 0001-" in text for text in problems
    )


def test_a_patch_too_large_for_vllm_is_refused(applied, capsys):
    checks.report_sizes(applied.load(), series.read(applied.load().series))
    assert "0001-Bugfix-KV-Offload-First.patch: 2 product, 0 test" in capsys.readouterr().out
    big = "".join(f"x{n} = {n}\n" for n in range(501))
    applied.commit_in_checkout("vllm/big.py", big, "[Core] Big")
    checkout.export(applied.load())
    with pytest.raises(Failure, match="more than 500 product lines"):
        checks.report_sizes(applied.load(), series.read(applied.load().series))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("[Core] Cut\n\nWhy.\n\n---\n\nThe rest is lost.", "does not survive as a patch"),
        ("[Core] Diff\n\ndiff --git a/x b/x\n", "nothing was written"),
        ("[Core] Other\n\nFrom: Nobody <n@example.org>\n\nWhy.", "does not survive"),
    ],
)
def test_a_commit_that_is_no_good_patch_is_refused_and_nothing_written(
    applied, message, complaint
):
    before = files(applied.load().series)
    applied.commit_in_checkout("vllm/third.py", "", "x")
    git(applied.load().checkout, "commit", "--quiet", "--amend", "--message", message)
    with pytest.raises(Failure, match=complaint):
        checkout.export(applied.load())
    assert files(applied.load().series) == before


def test_an_empty_commit_is_refused(applied):
    before = files(applied.load().series)
    git(applied.load().checkout, "commit", "--quiet", "--allow-empty", "--message", "[Core] No")
    with pytest.raises(Failure, match="nothing was written"):
        checkout.export(applied.load())
    assert files(applied.load().series) == before


def test_line_ends_survive(applied):
    applied.commit_in_checkout("vllm/dos.py", "one = 1\r\ntwo = 2\r\n", "[Core] Line ends")
    checkout.export(applied.load())
    round_trip(applied.load())


def test_a_newer_series_is_not_overwritten(applied):
    """As after a `git pull`: patches/ moved on, the checkout did not."""
    patches = series.read(applied.load().series)
    patches.popitem()
    series.write(applied.load().series, patches)
    with pytest.raises(Failure, match="has changed since it was applied here"):
        checkout.export(applied.load())
    assert series.read(applied.load().series) == patches


def test_a_checkout_without_commits_does_not_empty_the_series(applied):
    before = files(applied.load().series)
    git(applied.load().checkout, "reset", "--quiet", "--hard", "refs/series/base")
    with pytest.raises(Failure, match="the checkout has no commits"):
        checkout.export(applied.load())
    assert files(applied.load().series) == before


def test_a_change_of_mode_alone_is_no_removal(applied):
    (applied.load().checkout / "vllm/config.py").chmod(0o755)
    git(applied.load().checkout, "commit", "--quiet", "--all", "--message", "[Core] Mode")
    checkout.export(applied.load())
    effect = series.net_effect(series.read(applied.load().series))
    assert effect["vllm/config.py"][1] is not None


def test_what_surrounds_us_does_not_show_in_a_patch(applied, monkeypatch):
    before = files(applied.load().series)
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u10")
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'format.signoff'='true'")
    monkeypatch.setenv("GIT_TRACE", "1")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    checkout.export(applied.load())
    assert files(applied.load().series) == before
