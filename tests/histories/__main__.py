"""`python -m tests.histories`: replay random histories of every case on every geometry.

A failure is shown with the command that repeats it, and shrunk to a short history.
"""

import argparse
import ast
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import pins
from .cases import CASES, Portion, cases_of, command, geometries_of
from .findings import INVARIANTS, Violation
from .geometry import GEOMETRIES
from .history import History
from .known_faults import is_known
from .shrink import failure_of, shrink
from .stock import stock_path
from .world import Report, replay

# Histories that a process replays at a time.
_PORTION = 10
_PUBLISHED = "--published"


@dataclass
class _Target:
    """One case on one geometry, and how far it has come."""

    case: str
    geometry: str
    next_seed: int
    histories: int = 0
    seconds: float = 0.0
    known: int = 0
    failed: int = 0
    under_way: int = 0
    report: Report = field(default_factory=Report)

    def next_portion(self, options: argparse.Namespace) -> Portion | None:
        """What to replay next; None if nothing is left."""
        left = options.seed + options.histories - self.next_seed
        if options.steps:
            left = _PORTION if self.report.steps < options.steps else 0
        if left <= 0:
            return None
        seeds = range(self.next_seed, self.next_seed + min(left, _PORTION))
        self.next_seed = seeds.stop
        self.under_way += 1
        return Portion(self.case, self.geometry, seeds, dict(options.set))

    def take(self, portion: Portion, pin: str, options: argparse.Namespace) -> None:
        """Count what was replayed, and show what failed."""
        self.under_way -= 1
        self.report.add(portion.report)
        self.histories += len(portion.seeds)
        self.seconds += portion.seconds
        for seed, finding in portion.failures.items():
            violation = Violation(*finding)
            if not options.known and is_known(pin, portion.case, violation):
                self.known += 1
            else:
                self.failed += 1
                _show(portion, seed, violation, options)

    def __str__(self) -> str:
        last = self.next_seed - 1
        return (
            f"{self.case} on {self.geometry}, seeds {last + 1 - self.histories} to {last}: "
            f"{self.histories} histories, {self.report.steps} steps in {self.seconds:.0f} s of "
            f"the processor; {self.known} known faults, {self.failed} failures"
        )


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.published:
        return _run_published(sys.argv[1:] if arguments is None else arguments)
    if options.replay:
        return _replay_file(options.replay)
    pin, start = pins.current().TAG, time.monotonic()
    targets = [
        _Target(case, geometry, options.seed)
        for case in options.case or cases_of(pin)
        for geometry in options.geometry or geometries_of(case)
    ]
    for target, portion in _replay_all(targets, options):
        target.take(portion, pin, options)
        if options.steps and not target.under_way and target.report.steps >= options.steps:
            print(f"{pin}: {target}", flush=True)
        if sum(target.failed for target in targets) >= options.failures:
            break
    _print_sum(pin, targets, time.monotonic() - start)
    return int(any(target.failed for target in targets))


def _print_sum(pin: str, targets: list[_Target], elapsed: float) -> None:
    report = Report()
    for target in targets:
        report.add(target.report)
    count = sum(target.histories for target in targets)
    seconds = sum(target.seconds for target in targets)
    print(
        f"{pin}: {count} histories, {report.steps} steps in {elapsed:.0f} s "
        f"({60 * count / seconds:.0f} histories, {60 * report.steps / seconds:.0f} steps per "
        f"minute of a processor); "
        f"{report.requests} requests, {report.preemptions} preemptions, "
        f"{report.stores} stores of {report.stored_blocks} blocks, {report.loads} loads of "
        f"{report.loaded_blocks} blocks for {report.loaded_tokens} tokens; "
        f"{sum(target.known for target in targets)} known faults, "
        f"{sum(target.failed for target in targets)} failures"
    )


def _replay_all(
    targets: list[_Target], options: argparse.Namespace
) -> Iterator[tuple[_Target, Portion]]:
    """Replay portions in some processes, the first seeds of every target first."""
    queue = deque(targets)
    jobs = min(options.jobs, len(targets) * -(-options.histories // _PORTION))
    if options.jobs == 1 or (jobs == 1 and not options.steps):
        while queue:
            target = queue.popleft()
            if portion := target.next_portion(options):
                queue.append(target)
                yield target, portion.replay()
        return
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Portion], _Target] = {}
        try:
            while True:
                while queue and len(running) < 2 * options.jobs:
                    target = queue.popleft()
                    if portion := target.next_portion(options):
                        queue.append(target)
                        running[pool.submit(portion.replay)] = target
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
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


def _run_published(arguments: list[str]) -> int:
    """The same on vLLM as published, in another process."""
    rest = [word for word in arguments if word != _PUBLISHED]
    with tempfile.TemporaryDirectory(prefix="published-") as scratch:
        path = stock_path(pins.current().TAG, Path(scratch))
        command = [sys.executable, "-m", "tests.histories", *rest]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(path)}).returncode


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.histories", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add(_PUBLISHED, action="store_true", help="the release as published, without the series")
    add("--seed", type=int, default=0, help="seed of the first history")
    add("--histories", type=int, default=20, help="of each case and geometry")
    add("--steps", type=int, default=0, help="go on until each has made so many steps")
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
