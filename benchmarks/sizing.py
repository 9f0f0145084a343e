"""Draw what a GiB of host memory holds, for docs/sizing.md.

    build/bench/tools/bin/python -m benchmarks.sizing

The figures are the planner's (`scripts/capacity.py`), worked out in the test environment of
v0.19.1 and kept in docs/sizing.json, which a test compares with the planner again.
"""

import json
import os
import subprocess
import sys
from typing import Any

from .workers import ROOT, BenchmarkError, environment_python

FIGURES = ROOT / "docs" / "sizing.json"
_CONTEXTS = [1 << bits for bits in range(11, 19)]


def figures() -> list[dict[str, Any]]:
    """What a session of each length takes, by variant; this needs vLLM."""
    from scripts.capacity import VARIANTS, Question, plan

    return [
        {"variant": name, "context": context, "bytes_per_session": int(bytes_needed)}
        for name, config in VARIANTS.items()
        for context in _CONTEXTS
        if context <= config["max_position_embeddings"]
        for bytes_needed in [plan(Question(model=name, context=context)).bytes_per_session]
    ]


def draw(rows: list[dict[str, Any]]) -> None:
    """Tokens and sessions per GiB, by length of a session."""
    from . import plots

    plt = plots.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    for axes, label, value in (
        (left, "tokens in a GiB", lambda row: row["context"]),
        (right, "sessions in a GiB", lambda row: 1),
    ):
        for i, name in enumerate(variants):
            mine = [row for row in rows if row["variant"] == name]
            axes.plot(
                [row["context"] for row in mine],
                [value(row) * 2**30 / row["bytes_per_session"] for row in mine],
                color=plots.COLOURS[i],
                marker=plots.MARKERS[i],
                markersize=4,
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(_CONTEXTS, [f"{context // 1024}k" for context in _CONTEXTS])
        axes.minorticks_off()
        axes.set_xlabel("tokens of a session")
        axes.set_ylabel(label)
    right.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    left.set_yticks([1_000, 10_000, 100_000], ["1,000", "10,000", "100,000"])
    left.legend(ncols=2)
    plots.save(figure, FIGURES.with_suffix(".svg"))
    plt.close(figure)


def main() -> int:
    if sys.argv[1:] == ["--figures"]:
        FIGURES.write_text(json.dumps(figures(), indent=1) + "\n")
        return 0
    command = [environment_python("v0.19.1"), "-m", "benchmarks.sizing", "--figures"]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if subprocess.run(command, cwd=ROOT, env=os.environ | quiet).returncode:
        raise BenchmarkError("the planner failed, see above")
    draw(json.loads(FIGURES.read_text()))
    print(f"{FIGURES} and {FIGURES.with_suffix('.svg').name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
