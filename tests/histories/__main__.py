"""`python -m tests.histories`: replay random histories, or one that was saved."""

import argparse
import ast
import sys
import time
from pathlib import Path
from typing import Any

from .cases import CASES
from .findings import INVARIANTS, Violation
from .generate import random_history
from .geometry import GEOMETRIES
from .history import History
from .shrink import shrink
from .world import Report, replay


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.replay:
        return _replay_file(options.replay)
    given = dict(CASES[options.case]) if options.case else {}
    given |= dict(options.set)
    if options.geometry:
        given["geometry"] = options.geometry
    report, start, failures = Report(), time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.histories):
        history = random_history(seed, given)
        try:
            report.add(replay(history))
        except Violation as violation:
            failures += 1
            _show_failure(options, seed, history, violation)
            if failures >= options.failures:
                break
    seconds = time.monotonic() - start
    count = seed - options.seed + 1
    print(
        f"{count} histories, {report.steps} steps in {seconds:.0f} s "
        f"({60 * count / seconds:.0f} histories, {60 * report.steps / seconds:.0f} steps a "
        f"minute); {report.requests} requests, {report.preemptions} preemptions, "
        f"{report.stores} stores of {report.stored_blocks} blocks, {report.loads} loads of "
        f"{report.loaded_blocks} blocks for {report.loaded_tokens} tokens; "
        f"{failures} failures"
    )
    return int(failures > 0)


def _show_failure(
    options: argparse.Namespace, seed: int, history: History, violation: Violation
) -> None:
    print(f"seed {seed} breaks {violation}")
    print(f"  that is: {INVARIANTS[violation.invariant]}")
    command = [f"python -m tests.histories --seed {seed} --histories 1"]
    if options.case:
        command.append(f"--case {options.case}")
    if options.geometry:
        command.append(f"--geometry {options.geometry}")
    command += [f"--set {name}={value!r}" for name, value in options.set]
    print(f"  repeat: {' '.join(command)}", flush=True)
    if options.shrink:
        small = shrink(history, violation.invariant, seconds=options.shrink)
        print(f"  shrunken history:\n{small.to_json()}", flush=True)
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            path = options.save / f"{violation.invariant.lower()}-seed-{seed}.json"
            path.write_text(small.to_json())
            print(f"  saved as {path}")


def _replay_file(path: Path) -> int:
    try:
        print(replay(History.load(path)))
    except Violation as violation:
        print(f"{path} breaks {violation}")
        return 1
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history")
    parser.add_argument("--histories", type=int, default=100, help="how many to replay")
    parser.add_argument("--case", choices=CASES, help="settings and mix of this case")
    parser.add_argument("--geometry", choices=GEOMETRIES, help="the same for all of them")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="give a setting, or part of the mix, a value: --set blocks_per_chunk=8",
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument(
        "--shrink", type=float, default=30, metavar="SECONDS", help="0 leaves failures as found"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep shrunken failures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="replay a saved history")
    return parser.parse_args(arguments)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
