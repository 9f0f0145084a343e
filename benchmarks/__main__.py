"""`python -m benchmarks [NAME]`: run benchmarks, and draw up docs/benchmarks."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import prefixes, replays, report, results, scheduler_cost
from .workers import STOCK, BenchmarkError, environment_python

# A trace of a cluster is too much for one GPU; a few of its sessions are what one serves.
_PART = 32


def main() -> int:
    arguments = _parser().parse_args()
    try:
        for command in arguments.commands:
            start = time.monotonic()
            command(arguments)
            print(f"({time.monotonic() - start:.0f} s)", flush=True)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def add(name: str, text: str, *run: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--tree", help="vLLM v0.19.1 to measure; default: the installed wheel")
        sub.add_argument("--tree-33", help="the same for v0.33.0")
        sub.add_argument("--out", type=Path, default=results.FOLDER, help="folder for results")
        sub.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
        sub.set_defaults(commands=run)
        return sub

    def add_trace(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--trace", help="a trace file; default: made-up chats")
        sub.add_argument("--part", type=int, help="one in so many sessions of the trace")
        sub.add_argument("--geometry", default=replays.GEOMETRY)
        sub.add_argument("--sizes", help="GiB, separated by commas; nothing kept on the GPU")
        sub.add_argument("--subjects", help="parts of the names of what is to be compared")

    def add_cost(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--stock", default=STOCK, help="vLLM v0.19.1 to compare with")
        sub.add_argument("--rounds", type=int, default=5)
        sub.add_argument("--quick", action="store_true", help="fewer cases, nothing saved")

    everything = add("all", "all of them", _moved, _kept, _replays, _cost, _gpu, _report)
    add_trace(everything)
    add_cost(everything)
    add("moved", "bytes moved to restore a prefix", _moved)
    add("kept", "host memory for a prompt", _kept)
    add_trace(add("replays", "what comes back, by size of host memory", _replays))
    add_cost(add("scheduler_cost", "CPU time on the scheduler's side", _cost))
    add("gpu_copies", "copies between host and GPU, where there is one", _gpu)
    add("report", "draw up the page from saved results", _report)
    return parser


def _finish(
    name: str,
    data: dict[str, Any],
    arguments: argparse.Namespace,
    save: bool = True,
    variant: str = "",
) -> None:
    section = next(s for s in report.SECTIONS if s.name == name)
    data = {"made_by": results.circumstances(), **data}
    print(f"\n{section.tables(data)}\n")
    _print_targets(section.targets(data))
    if save:
        print(f"saved {results.save(f'{name}{variant}', data, arguments.out)}")


def _print_targets(targets: Iterable[report.Target]) -> None:
    for what, target, measured, met in targets:
        print(f"{'met   ' if met else 'MISSED'} {what}: {measured}; target {target}")


def _moved(arguments: argparse.Namespace) -> None:
    rows = prefixes.measure_moved(arguments.tree, arguments.jobs)
    _finish("moved", {"rows": rows}, arguments)


def _kept(arguments: argparse.Namespace) -> None:
    trees = prefixes.subjects(arguments.tree, arguments.tree_33)
    rows = prefixes.measure_kept(trees, arguments.jobs)
    _finish("kept", {"rows": rows}, arguments)


def _replays(arguments: argparse.Namespace) -> None:
    runs = replays.plan(arguments.tree, arguments.tree_33)
    if arguments.sizes:
        sizes = [int(size) for size in arguments.sizes.split(",")]
        everyone = dict.fromkeys(run.subject for run in runs)
        runs = [replays.Run(s, size, None) for s in everyone for size in sizes]
    if arguments.subjects:
        wanted = arguments.subjects.split(",")
        runs = [run for run in runs if any(name in run.subject.name for name in wanted)]
    part = arguments.part or (_PART if arguments.trace else 1)
    done = replays.measure(
        runs, arguments.trace, part, geometry=arguments.geometry, jobs=arguments.jobs
    )
    what = replays.describe(done, arguments.trace, part, arguments.geometry)
    _finish(
        "replays",
        {"what": what, "runs": done},
        arguments,
        save=not (arguments.sizes or arguments.subjects),
        variant=f"-{Path(arguments.trace).stem}" if arguments.trace else "",
    )


def _cost(arguments: argparse.Namespace) -> None:
    data = scheduler_cost.measure(
        arguments.tree, arguments.stock, arguments.rounds, arguments.quick
    )
    _finish("scheduler_cost", data, arguments, save=not arguments.quick)


def _gpu(arguments: argparse.Namespace) -> None:
    script = Path(__file__).with_name("gpu_copies.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        python = environment_python("v0.19.1")
        done = subprocess.run([python, script, "--out", out], check=False)
        if done.returncode:
            raise BenchmarkError(f"{script.name} failed; see above")
        _finish("gpu_copies", json.loads(out.read_text()), arguments)


def _report(arguments: argparse.Namespace) -> None:
    print()
    _print_targets(report.target_rows(arguments.out))
    print(f"see {report.write(arguments.out)}")


if __name__ == "__main__":
    sys.exit(main())
