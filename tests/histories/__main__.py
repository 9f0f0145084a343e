"""`python -m tests.histories`: replay random histories of every case on every geometry.

A failure is shown with the command that repeats it, and shrunk to a short history.
"""

import argparse
import ast
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from . import pins
from .cases import CASES, Portion, cases_of, command, geometries_of
from .findings import INVARIANTS, Violation
from .geometry import GEOMETRIES
from .history import History
from .known_faults import is_known
from .shrink import failure_of, shrink
from .world import Report, replay

# Histories that a process replays at a time.
_PORTION = 5


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.replay:
        return _replay_file(options.replay)
    pin = pins.current().TAG
    report, start, count, known, failed = Report(), time.monotonic(), 0, 0, 0
    for portion in _replay_all(_portions(options, pin), options.jobs):
        report.add(portion.report)
        count += len(portion.seeds)
        for seed, finding in portion.failures.items():
            violation = Violation(*finding)
            if not options.known and is_known(pin, portion.case, violation):
                known += 1
            else:
                failed += 1
                _show(portion, seed, violation, options)
        if failed >= options.failures:
            break
    minutes = (time.monotonic() - start) / 60
    print(
        f"{pin}: {count} histories, {report.steps} steps in {60 * minutes:.0f} s "
        f"({count / minutes:.0f} histories, {report.steps / minutes:.0f} steps a minute); "
        f"{report.requests} requests, {report.preemptions} preemptions, "
        f"{report.stores} stores of {report.stored_blocks} blocks, {report.loads} loads of "
        f"{report.loaded_blocks} blocks for {report.loaded_tokens} tokens; "
        f"{known} known faults, {failed} failures"
    )
    return int(failed > 0)


def _portions(options: argparse.Namespace, pin: str) -> list[Portion]:
    """All that is to be replayed, the first seeds of everything first."""
    end = options.seed + options.histories
    return [
        Portion(
            case,
            geometry,
            range(seed, min(seed + _PORTION, end)),
            dict(options.set),
        )
        for seed in range(options.seed, end, _PORTION)
        for case in options.case or cases_of(pin)
        for geometry in options.geometry or geometries_of(case)
    ]


def _replay_all(portions: list[Portion], jobs: int) -> Iterator[Portion]:
    """Replay them in some processes; the answers keep their order."""
    if jobs == 1 or len(portions) == 1:
        yield from (portion.replay() for portion in portions)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context) as pool:
        results = [pool.submit(portion.replay) for portion in portions]
        try:
            yield from (result.result() for result in results)
        finally:
            pool.shutdown(cancel_futures=True)


def _show(
    portion: Portion, seed: int, violation: Violation, options: argparse.Namespace
) -> None:
    repeat = command(portion.case, portion.geometry, seed, **portion.given)
    print(f"{portion.case} on {portion.geometry}, seed {seed}, breaks {violation}")
    print(f"  that is: {INVARIANTS[violation.invariant]}")
    print(f"  repeat: {repeat}", flush=True)
    if options.shrink:
        small = shrink(portion.history(seed), violation.invariant, tries=options.shrink)
        print(f"  shrunken history, which breaks {failure_of(small)}:\n{small.to_json()}")
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            path = options.save / f"{portion.case}-{portion.geometry}-{seed}.json"
            path.write_text(small.to_json())
            print(f"  saved as {path}", flush=True)


def _replay_file(path: Path) -> int:
    violation = failure_of(History.load(path), lambda history: print(replay(history)))
    if violation is not None:
        print(f"{path} breaks {violation}")
    return int(violation is not None)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed of the first history")
    add("--histories", type=int, default=10, help="of each case and geometry")
    add("--case", choices=CASES, action="append", help="only this case; may be repeated")
    add("--geometry", choices=GEOMETRIES, action="append", help="on this one; may be repeated")
    add(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="give a setting, or part of the mix, a value: --set blocks_per_chunk=8; a list "
        "is a choice",
    )
    add("--jobs", type=int, default=os.cpu_count(), help="processes")
    add("--failures", type=int, default=1, help="stop after so many")
    add("--known", action="store_true", help="count known faults as failures")
    add(
        "--shrink",
        type=int,
        default=300,
        metavar="TRIES",
        help="replays to make a failure small; 0 leaves it as found",
    )
    add("--save", type=Path, metavar="FOLDER", help="keep shrunken failures")
    add("--replay", type=Path, metavar="FILE", help="replay a saved history")
    return parser.parse_args(arguments)


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    sys.exit(main())
