"""Prefixes one by one, CPU time, copies on a GPU, and the page that shows them."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu_copies, prefixes, replays, report, results
from benchmarks import scheduler_cost as cost
from benchmarks.inside import prefixes as inside_prefixes
from benchmarks.inside import scheduler_cost as inside_cost
from benchmarks.inside.engine import PIN


@pytest.mark.parametrize("geometry", ["gemma4-e2b", "gemma4-31b"])
def test_restoring_moves_no_byte_too_many(geometry: str) -> None:
    rows = inside_prefixes.moved(geometry, "bf16", 1, 4096, [0.0, 0.5])
    for row in rows:
        assert row["bytes"] == row["least_bytes"] > 0
        assert row["restored"] >= 4096 - row["common"]
        assert row["runs"] <= row["blocks"]
    assert rows[1]["on_gpu"] == 2048
    assert rows[1]["bytes"] < rows[0]["bytes"]


def test_a_tier_without_room_restores_less(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = inside_prefixes.per_gib("gemma4-e2b", 2048, 4)
    assert figures["best_per_gib"] / 4 < figures["tokens_per_gib"] <= figures["best_per_gib"]
    # A wrong least would show: with half of it the tier holds half of the prompts.
    monkeypatch.setattr(inside_prefixes, "prefix_blocks", _half)
    figures = inside_prefixes.per_gib("gemma4-e2b", 2048, 4)
    assert figures["tokens_per_gib"] <= figures["best_per_gib"] / 2


def _half(*arguments: object) -> int:
    from benchmarks.minimum import prefix_blocks

    return prefix_blocks(*arguments) // 2


@pytest.mark.skipif(PIN.TAG != "v0.19.1", reason="measured on v0.19.1 alone")
def test_cpu_time_is_taken_where_the_work_is() -> None:
    started = inside_cost.start("gemma4-e2b", requests=2, context=1024, evicting=False)
    assert started["prefill_ns_per_1024"] > 0
    steps = inside_cost.decode(started["period"])
    assert len(steps) == started["period"]
    assert all(0 < connector < scheduler for connector, scheduler in steps)
    looked = inside_cost.look_ups(2)
    assert set(looked) == {"hit", "half", "miss", "resume"}


def test_growth_is_an_exponent() -> None:
    def case(requests: int, context: int) -> dict:
        figures = {"step_us": 3 * requests**0.5, "look_up_us": {"hit": 2 * context**1.5}}
        return {"requests": requests, "context": context, "evicting": False,
                "subjects": {"stock": figures}}  # fmt: skip

    growth = cost._growth([case(16, 8192), case(64, 8192), case(16, 1024)])["stock"]
    assert growth["step by requests"] == pytest.approx(0.5)
    assert growth["step by context"] == pytest.approx(0)
    assert growth["look-up by context"] == pytest.approx(1.5)


def test_the_gpu_script_runs_dry_and_says_when_it_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    assert gpu_copies.main(["--dry-run", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {row["variant"] for row in result["bandwidth"]["pages"]} == {
        variant.name for variant in gpu_copies.VARIANTS
    }
    assert len(result["decode"]) == len(result["first_token"]) == len(gpu_copies.VARIANTS)
    capsys.readouterr()
    monkeypatch.setattr(gpu_copies.torch.cuda, "is_available", lambda: False)
    assert gpu_copies.main(["--out", str(out)]) == 0
    assert json.loads(out.read_text())["ran"] is False
    assert "did not run" in capsys.readouterr().out


def test_the_gpu_script_knows_the_layouts() -> None:
    from benchmarks.inside.engine import Engine, Setup

    for variant in gpu_copies.VARIANTS:
        engine = Engine(
            Setup(prefixes.VARIANTS[variant.name], host_bytes=1 << 40, max_model_len=1024)
        )
        sliding = [group for group in engine.groups if group.window]
        full = [group for group in engine.groups if not group.window]
        assert engine.bytes_per_block == variant.page * variant.tensors
        assert [group.block_size for group in full] == [variant.full_block]
        assert len(sliding) == variant.windows
        assert {g.window // g.block_size for g in sliding} == {variant.window_blocks}
        engine.close()


def test_copies_that_belong_together_are_joined() -> None:
    assert gpu_copies.joined([3, 4, 9], [0, 1, 2]) == [(3, 0, 2), (9, 2, 1)]
    ids = gpu_copies.scattered(64, 8)
    assert sorted(ids) == list(range(64))
    assert len(gpu_copies.joined(ids, ids)) <= 8


def run(subject: str, gib: int, restored: float, written: int) -> dict:
    return {
        "subject": subject,
        "host_gib": gib,
        "gpu_gib": None,
        "restored": restored,
        "on_gpu": 0.0,
        "stored": {"bytes": written},
        "loaded": {"runs": 1, "blocks": 2},
    }


def test_targets_are_met_or_missed_by_the_figures(tmp_path: Path) -> None:
    runs = [run("everything kept", 16, 0.1, 100), run("this series", 16, 0.39, 20),
            run("everything kept", 64, 0.1, 100), run("this series", 64, 0.2, 20),
            run("v0.33.0", 64, 0.21, 20)]  # fmt: skip
    assert [met for *_, met in replays.targets(runs)] == [False, True, True, False]
    results.save("replays", {"made_by": results.circumstances(), "runs": runs, "what": "-"},
                 tmp_path)  # fmt: skip
    pytest.importorskip("matplotlib")
    page = report.write(tmp_path).read_text()
    assert "**no**" in page
    assert "![" in page
    assert (tmp_path / "restored.svg").read_text().startswith("<?xml")
