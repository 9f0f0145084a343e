"""`python -m tests.histories`: replay random histories, or one that was saved.

Failures are shown with the command that repeats them and shrunk to a short history.
"""

import argparse
import ast
import multiprocessing
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from .cases import CASES
from .findings import INVARIANTS, Violation
from .generate import random_history
from .geometry import GEOMETRIES
from .history import History
from .shrink import failure_of, shrink
from .world import Report, replay

# Histories that a process replays at a time.
_PORTION = 10

Given = dict[str, Any]
Failures = dict[int, tuple[str, str]]


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.replay:
        return _replay_file(options.replay)
    given = dict(CASES[options.case]) if options.case else {}
    given |= dict(options.set)
    if options.geometry:
        given["geometry"] = options.geometry
    report, start, count, failed = Report(), time.monotonic(), 0, 0
    for seeds, part, failures in _portions(options, given):
        report.add(part)
        count += len(seeds)
        for seed, (invariant, message) in failures.items():
            failed += 1
            _show_failure(options, given, seed, Violation(invariant, message))
        if failed >= options.failures:
            break
    minutes = (time.monotonic() - start) / 60
    print(
        f"{count} histories, {report.steps} steps in {60 * minutes:.0f} s "
        f"({count / minutes:.0f} histories, {report.steps / minutes:.0f} steps a minute); "
        f"{report.requests} requests, {report.preemptions} preemptions, "
        f"{report.stores} stores of {report.stored_blocks} blocks, {report.loads} loads of "
        f"{report.loaded_blocks} blocks for {report.loaded_tokens} tokens; "
        f"{failed} failures"
    )
    return int(failed > 0)


def _portions(
    options: argparse.Namespace, given: Given
) -> Iterator[tuple[range, Report, Failures]]:
    end = options.seed + options.histories
    portions = [
        range(seed, min(seed + _PORTION, end)) for seed in range(options.seed, end, _PORTION)
    ]
    if options.jobs == 1:
        for seeds in portions:
            yield seeds, *_replay_all(seeds, given)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        results = [pool.submit(_replay_all, seeds, given) for seeds in portions]
        try:
            for seeds, result in zip(portions, results, strict=True):
                yield seeds, *result.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _replay_all(seeds: range, given: Given) -> tuple[Report, Failures]:
    report, failures = Report(), {}
    for seed in seeds:
        try:
            report.add(replay(random_history(seed, given)))
        except Violation as violation:
            failures[seed] = violation.invariant, violation.message
    return report, failures


def _show_failure(
    options: argparse.Namespace, given: Given, seed: int, violation: Violation
) -> None:
    print(f"seed {seed} breaks {violation}")
    print(f"  that is: {INVARIANTS[violation.invariant]}")
    command = [f"python -m tests.histories --seed {seed} --histories 1"]
    if options.case:
        command.append(f"--case {options.case}")
    if options.geometry:
        command.append(f"--geometry {options.geometry}")
    command += [f"--set {shlex.quote(f'{name}={value!r}')}" for name, value in options.set]
    print(f"  repeat: {' '.join(command)}", flush=True)
    if options.shrink:
        small = shrink(random_history(seed, given), violation.invariant, seconds=options.shrink)
        print(f"  shrunken history, which breaks {failure_of(small)}:\n{small.to_json()}")
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            path = options.save / f"{violation.invariant.lower()}-seed-{seed}.json"
            path.write_text(small.to_json())
            print(f"  saved as {path}", flush=True)


def _replay_file(path: Path) -> int:
    violation = failure_of(History.load(path), lambda history: print(replay(history)))
    if violation is not None:
        print(f"{path} breaks {violation}")
    return int(violation is not None)


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
        help="give a setting, or part of the mix, a value: --set blocks_per_chunk=8; a list "
        "is a choice",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    parser.add_argument(
        "--shrink",
        type=float,
        default=30,
        metavar="SECONDS",
        help="time to make a failure small; 0 leaves it as found",
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
