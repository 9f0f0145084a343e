"""Plots of results, as SVG that can be read on a light and on a dark page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import prefixes, replays

_INK = "#768390"
COLOURS = ("#2f81f7", "#d29922", "#3fb950", "#a371f7", "#f47067", "#768390")
MARKERS = "osD^vX"
# Of what is in all plots: colours go with names.
_ORDER = (
    "this series",
    "everything kept",
    "v0.33.0",
    "v0.33.0, this series",
    "v0.33.0, answers too",
    "SimpleCPUOffloadConnector",
)


def pyplot() -> Any:
    """matplotlib.pyplot, in a style that can be read on a light and on a dark page."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "svg.hashsalt": "benchmarks",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 11,
            "text.color": _INK,
            "axes.edgecolor": _INK,
            "axes.labelcolor": _INK,
            "axes.titlecolor": _INK,
            "axes.grid": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": _INK,
            "ytick.color": _INK,
            "grid.color": _INK,
            "grid.alpha": 0.25,
            "legend.frameon": False,
            "lines.linewidth": 2,
            "savefig.transparent": True,
        }
    )
    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG, the same bytes every time."""
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    # No blanks at the ends of lines, as in every other file.
    text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
    path.write_text(text + "\n")


def _style(name: str) -> dict[str, Any]:
    i = _ORDER.index(name) if name in _ORDER else len(_ORDER) - 1
    return {"color": COLOURS[i], "marker": MARKERS[i], "label": name}


def by_host_memory(runs: Sequence[dict[str, Any]], folder: Path, suffix: str = "") -> list[str]:
    """Share restored and bytes written, by size of the host tier, nothing on the GPU."""
    plt = pyplot()
    files = []
    for file, label, value in (
        (f"restored{suffix}.svg", "share of prompt tokens restored", lambda r: r["restored"]),
        (
            f"written{suffix}.svg",
            "GiB copied from GPU to host",
            lambda r: r["stored"]["bytes"] / replays.GIB,
        ),
    ):
        figure, axes = plt.subplots(figsize=(7.5, 4.5))
        for name in _ORDER:
            mine = sorted(
                (r["host_gib"], value(r))
                for r in runs
                if r["subject"] == name
                and r["gpu_gib"] is None
                and r["host_gib"] < replays.AMPLE
            )
            if mine:
                axes.plot(*zip(*mine, strict=True), **_style(name))
        axes.set_xscale("log", base=2)
        sizes = sorted({r["host_gib"] for r in runs if r["host_gib"] < replays.AMPLE})
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("host memory, GiB")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend()
        save(figure, folder / file)
        plt.close(figure)
        files.append(file)
    return files


def kept(rows: Sequence[dict[str, Any]], folder: Path, suffix: str = "") -> list[str]:
    """Tokens that come back per GiB of a full tier, against the most there can be."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4))
    rows = [row for row in rows if row["tokens"] == 8192]
    names = list(dict.fromkeys(row["subject"] for row in rows))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        shares = [
            next(
                r["tokens_per_gib"] / r["best_per_gib"]
                for r in rows
                if r["subject"] == name and r["variant"] == variant
            )
            for variant in prefixes.VARIANTS
        ]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(shares))]
        style = _style(name)
        axes.bar(places, shares, width * 0.9, color=style["color"], label=name)
    axes.set_xticks(range(len(prefixes.VARIANTS)), list(prefixes.VARIANTS))
    axes.set_ylabel("tokens per GiB / the most")
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("variant, prompts of 8,192 tokens, host memory full")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=len(names))
    save(figure, folder / f"per_gib{suffix}.svg")
    plt.close(figure)
    return [f"per_gib{suffix}.svg"]


def scheduler_cost(data: dict[str, Any], folder: Path, suffix: str = "") -> list[str]:
    """CPU time per step by running requests, and per look-up by length."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4))
    steady = [case for case in data["cases"] if not case["evicting"]]
    usual = {"requests": 16, "context": 8192}
    for axes, by, fixed, label, value in (
        (left, "requests", "context", "requests that generate", lambda s: s["step_us"]),
        (
            right,
            "context",
            "requests",
            "tokens looked up",
            lambda s: s["look_up_us"]["hit"],
        ),
    ):
        cases = sorted(
            (c for c in steady if c[fixed] == usual[fixed]), key=lambda c, by=by: c[by]
        )
        for i, name in enumerate(data["cases"][0]["subjects"]):
            axes.plot(
                [c[by] for c in cases],
                [value(c["subjects"][name]) for c in cases],
                color=COLOURS[(1, 0, 2)[i]],
                marker=MARKERS[i],
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([c[by] for c in cases], [f"{c[by]:,}" for c in cases])
        axes.set_xlabel(label)
        axes.legend()
    left.set_ylabel("CPU time in the connector per step, us")
    right.set_ylabel("CPU time per look-up, us")
    save(figure, folder / f"scheduler_cost{suffix}.svg")
    plt.close(figure)
    return [f"scheduler_cost{suffix}.svg"]
