"""The page in docs/benchmarks: targets, tables and plots of the results that are there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import plots, prefixes, replays, results, scheduler_cost

Target = tuple[str, str, str, bool]


@dataclass(frozen=True)
class Section:
    """How one file of results is shown."""

    name: str
    title: str
    tables: Callable[[Any], str]
    targets: Callable[[Any], list[Target]]
    plots: Callable[[Any, Path, str], list[str]] | None = None


SECTIONS = (
    Section(
        "moved",
        "Bytes moved to restore a prefix",
        lambda d: prefixes.tables_moved(d["rows"]),
        lambda d: prefixes.targets_moved(d["rows"]),
    ),
    Section(
        "kept",
        "Host memory for a prompt",
        lambda d: prefixes.tables_kept(d["rows"]),
        lambda d: prefixes.targets_kept(d["rows"]),
        lambda d, *place: plots.kept(d["rows"], *place),
    ),
    Section(
        "replays",
        "A trace, replayed",
        lambda d: f"{d['what']}\n\n{replays.tables(d['runs'])}",
        lambda d: replays.targets(d["runs"]),
        lambda d, *place: plots.by_host_memory(d["runs"], *place),
    ),
    Section(
        "scheduler_cost",
        "CPU time of the scheduler",
        scheduler_cost.tables,
        scheduler_cost.targets,
        plots.scheduler_cost,
    ),
    Section(
        "gpu_copies",
        "Copies on a GPU",
        lambda d: _gpu(d),
        lambda d: [],
    ),
)


_INTRODUCTION = """\
`make bench` made this page: vLLM's own scheduler, KV cache manager and connector, with a model
and copies that take no time, on the cache layouts of the real models. No GPU is needed, except
for the last part."""


def _gpu(data: dict[str, Any]) -> str:
    if not data["ran"]:
        return f"Did not run: {data['why']}."
    rows, large = data["bandwidth"]["pages"], data["bandwidth"]["large"]
    return "\n\n".join(
        [
            (
                f"{data['device']}; one large copy {large['load']:.1f} GB/s to the GPU, "
                f"{large['store']:.1f} GB/s back."
            ),
            results.table(
                ["variant", "KiB per page", "way", "in a row", "manner", "GB/s", "of large"],
                [
                    [
                        row["variant"],
                        row["page_bytes"] // 1024,
                        row["way"],
                        row["in_a_row"],
                        row["manner"],
                        row["gb_per_s"],
                        row["of_large"],
                    ]
                    for row in rows
                ],
            ),
            results.table(
                ["first token", "tokens", "restored, ms", "computed, ms"],
                [
                    [r["variant"], r["tokens"], r["restored_s"] * 1e3, r["computed_s"] * 1e3]
                    for r in data["first_token"]
                ],
            ),
            results.table(
                ["per generated token", "alone, ms", "beside loads, ms", "beside stores, ms"],
                [
                    [
                        r["variant"],
                        *(
                            r[f"{k}_s"] * 1e3
                            for k in ("alone", "beside_loads", "beside_stores")
                        ),
                    ]
                    for r in data["decode"]
                ],
            ),
        ]
    )


def target_rows(folder: Path = results.FOLDER) -> list[Target]:
    return [
        target
        for section in SECTIONS
        for _, data in results.load(section.name, folder)
        for target in section.targets(data)
    ]


def write(folder: Path = results.FOLDER) -> Path:
    """Draw up the page from the results in the folder."""
    parts = ["# Benchmarks", _INTRODUCTION,
        "## Targets",
        results.table(
            ["what", "target", "measured", "met"],
            [[what, aim, got, "yes" if met else "**no**"]
             for what, aim, got, met in target_rows(folder)],
        ).replace("---:", "---"),
    ]  # fmt: skip
    for section in SECTIONS:
        for stem, data in results.load(section.name, folder):
            parts += [f"## {section.title}", _circumstances(data)]
            if section.plots is not None:
                files = section.plots(data, folder, stem.removeprefix(section.name))
                parts += [f"![{section.title}]({file})" for file in files]
            parts.append(section.tables(data))
    path = folder / "README.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _circumstances(data: dict[str, Any]) -> str:
    made_by = data["made_by"]
    return f"{made_by['date']}, {made_by['machine']}: `{made_by['command']}`"
