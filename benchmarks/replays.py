"""Replays of a trace: what comes back from host memory, by how much of it there is."""

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .results import table
from .workers import STOCK, Worker

GIB = 1 << 30
GEOMETRY = "gemma4-26b-a4b"
SIZES = (4, 8, 16, 32, 64, 128, 256)
AMPLE = 4096
# KV cache of the 26B on a GPU of 80 GB, about.
GPU_GIB = 16
_FEW_SIZES = (16, 64, AMPLE)
_SOME_SIZES = (4, 16, 64, 256, AMPLE)


@dataclass(frozen=True)
class Subject:
    """A policy, and the vLLM that follows it."""

    name: str
    pin: str
    tree: str | None
    policy: str


def subjects(tree: str | None, tree_33: str | None) -> list[Subject]:
    """Those that all sizes are tried with."""
    return [
        Subject("everything kept", "v0.19.1", tree, "everything"),
        Subject("this series", "v0.19.1", tree, "product"),
        Subject("v0.33.0", "v0.33.0", STOCK, "product"),
        Subject("v0.33.0, answers too", "v0.33.0", STOCK, "answers"),
        Subject("v0.33.0, this series", "v0.33.0", tree_33, "answers"),
        Subject("SimpleCPUOffloadConnector", "v0.19.1", STOCK, "simple"),
    ]


def parts(tree: str | None) -> list[Subject]:
    """This series with parts switched off."""
    return [
        Subject(name, "v0.19.1", tree, name)
        for name in (
            "no checkpoints",
            "no shared prefixes",
            "no answer ends",
            "no prompt ends",
            "prompt ends only",
        )
    ]


@dataclass(frozen=True)
class Run:
    subject: Subject
    host_gib: int
    gpu_gib: int | None


def plan(tree: str | None, tree_33: str | None) -> list[Run]:
    main = subjects(tree, tree_33)
    runs = [
        Run(s, size, None)
        for i, s in enumerate(main)
        for size in ((*SIZES, AMPLE) if i < 3 else _SOME_SIZES)
    ]
    # SimpleCPUOffloadConnector does not end with a pool shorter than a prompt: the release
    # as published waits for room for all of its sliding layers.
    runs += [Run(s, size, GPU_GIB) for s in main[:3] for size in _FEW_SIZES]
    runs += [Run(s, size, None) for s in parts(tree) for size in _FEW_SIZES]
    return runs


def _report(text: str) -> None:
    print(text, flush=True)


def measure(
    runs: list[Run],
    trace: str | None,
    part: int,
    seed: int = 0,
    geometry: str = GEOMETRY,
    jobs: int = 2,
    report: Callable[[str], None] = _report,
) -> list[dict[str, Any]]:
    """Replay the trace once for each run.

    Args:
        runs: what to replay on.
        trace: path of a trace, None for made-up chats.
        part: one in so many of the trace's sessions.
        seed: chooses sessions, or makes chats.
        geometry: of the model.
        jobs: processes at a time.
        report: is told what comes out.
    """
    by_tree: dict[tuple[str, str | None], list[Run]] = {}
    for run in runs:
        by_tree.setdefault((run.subject.pin, run.subject.tree), []).append(run)
    # A process stays with a tree; the longest lists are shared out.
    shares = [
        (key, todo[i::jobs])
        for key, todo in by_tree.items()
        for i in range(jobs)
        if todo[i::jobs]
    ]

    def work(share: tuple[tuple[str, str | None], list[Run]]) -> list[dict[str, Any]]:
        (pin, tree), todo = share
        done = []
        with Worker(pin, tree) as worker:
            for run in todo:
                result = worker.call(
                    "replay.replay",
                    policy=run.subject.policy,
                    geometry=geometry,
                    host_bytes=run.host_gib * GIB,
                    gpu_bytes=run.gpu_gib and run.gpu_gib * GIB,
                    trace=trace,
                    part=part,
                    seed=seed,
                )
                done.append(
                    {
                        "subject": run.subject.name,
                        "host_gib": run.host_gib,
                        "gpu_gib": run.gpu_gib,
                        "geometry": geometry,
                        **result,
                    }
                )
                report(
                    f"{geometry} {run.subject.name}, {run.host_gib} GiB"
                    f"{' beside ' + str(run.gpu_gib) if run.gpu_gib else ''}: "
                    f"{result['restored']:.3f} restored, "
                    f"{result['stored']['bytes'] / GIB:.0f} GiB written "
                    f"({result['cpu_seconds']:.1f} s)"
                )
        return done

    with ThreadPoolExecutor(jobs) as pool:
        return list(itertools.chain.from_iterable(pool.map(work, shares)))


def find(
    done: Iterable[dict[str, Any]], subject: str, host_gib: int, gpu_gib: int | None = None
) -> dict[str, Any] | None:
    return next(
        (
            run
            for run in done
            if (run["subject"], run["host_gib"], run["gpu_gib"]) == (subject, host_gib, gpu_gib)
        ),
        None,
    )


def saved(run: dict[str, Any] | None) -> float | None:
    """Share of the prompts' tokens that were not computed again."""
    return None if run is None else run["restored"] + run["on_gpu"]


def size_name(host_gib: int) -> str:
    return "ample" if host_gib >= AMPLE else f"{host_gib}"


def tables(done: list[dict[str, Any]]) -> str:
    def grid(gpu: int | None, value: Callable[[dict[str, Any]], Any]) -> str:
        here = [run for run in done if run["gpu_gib"] == gpu]
        sizes = sorted({run["host_gib"] for run in here})
        names = list(dict.fromkeys(run["subject"] for run in here))
        rows = []
        for name in names:
            cells = [find(here, name, size, gpu) for size in sizes]
            rows.append([name, *(None if run is None else value(run) for run in cells)])
        return table(["host memory, GiB", *map(size_name, sizes)], rows)

    parts = []
    for gpu, where in (
        (None, "nothing is kept on the GPU"),
        (GPU_GIB, f"the GPU keeps {GPU_GIB} GiB"),
    ):
        if not any(run["gpu_gib"] == gpu for run in done):
            continue
        parts += [
            f"Share of the prompts' tokens that came back from host memory; {where}:",
            grid(gpu, lambda run: f"{run['restored']:.3f}"),
        ]
        if gpu:
            parts += [
                "The same with what the GPU had by itself:",
                grid(gpu, lambda run: f"{saved(run):.3f}"),
            ]
        parts += [
            "GiB copied from the GPU to host memory:",
            grid(gpu, lambda run: f"{run['stored']['bytes'] / GIB:,.0f}"),
            "Copies per block that was loaded, when neighbours are copied together:",
            grid(
                gpu,
                lambda run: f"{run['loaded']['runs'] / max(1, run['loaded']['blocks']):.2f}",
            ),
        ]
    return "\n\n".join(parts)


def targets(done: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    """What was to be reached: name, target, measured, whether it is met."""
    rows = []
    for gpu in (None, GPU_GIB):
        beside = f", GPU {gpu} GiB" if gpu else ""
        for size, least in ((16, 4.0), (64, 2.0)):
            ours = find(done, "this series", size, gpu)
            dense = find(done, "everything kept", size, gpu)
            if ours is None or dense is None:
                continue
            ratio = ours["restored"] / max(dense["restored"], 1e-9)
            rows.append(
                (
                    f"tokens restored / everything kept, {size} GiB{beside}",
                    f"at least {least:.0f}",
                    f"{ratio:.2f} ({ours['restored']:.3f} / {dense['restored']:.3f})",
                    ratio >= least,
                )
            )
            if size == 64:
                less = dense["stored"]["bytes"] / ours["stored"]["bytes"]
                rows.append(
                    (
                        f"fewer bytes written than everything kept, {size} GiB{beside}",
                        "at least 5 times",
                        f"{less:.2f}",
                        less >= 5,
                    )
                )
        ours, dense = (find(done, n, AMPLE, gpu) for n in ("this series", "everything kept"))
        if ours and dense:
            ratio = saved(ours) / saved(dense)
            rows.append(
                (
                    f"tokens not computed again / everything kept, ample memory{beside}",
                    "at least 0.98",
                    f"{ratio:.3f} ({saved(ours):.3f} / {saved(dense):.3f})",
                    ratio >= 0.98,
                )
            )
        rows += _against_33(done, gpu, beside)
    return rows


def _against_33(
    done: list[dict[str, Any]], gpu: int | None, beside: str
) -> list[tuple[str, str, str, bool]]:
    worst = None
    for run in done:
        if run["subject"] != "this series" or run["gpu_gib"] != gpu:
            continue
        for name in ("v0.33.0", "v0.33.0, answers too"):
            other = find(done, name, run["host_gib"], gpu)
            if other and (worst is None or saved(run) - saved(other) < worst[0]):
                worst = (saved(run) - saved(other), run, other)
    if worst is None:
        return []
    less, run, other = worst
    return [
        (
            f"tokens not computed again, less v0.33.0's{beside}",
            "never below 0",
            (
                f"{less:+.3f} at the worst, {size_name(run['host_gib'])} GiB "
                f"({saved(run):.3f} / {saved(other):.3f})"
            ),
            less >= 0,
        )
    ]


def describe(done: list[dict[str, Any]], trace: str | None, part: int, geometry: str) -> str:
    """What was replayed, in a sentence."""
    first = done[0]
    source = "Made-up chats (seed 0)"
    if trace is not None:
        source = f"One in {part} sessions (seed 0) of `{Path(trace).name}`"
    timed = ""
    if any(run["gpu_gib"] for run in done):
        timed = (
            f" Beside {GPU_GIB} GiB on the GPU, requests arrive by the trace's clock, "
            "prompts are computed at 10,000 tokens and answers at 33 tokens a second; else "
            "one request follows the other."
        )
    return (
        f"{source} on {geometry}: {first['requests']:,} requests, "
        f"{first['prompt_tokens']:,} tokens of prompts.{timed}"
    )  # fmt: skip
