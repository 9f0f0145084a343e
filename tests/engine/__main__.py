"""`python -m tests.engine`: the cases of the bed, all or some, for a seed.

Each failure is shown with the command that repeats it.
"""

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from environment import RELEASE  # isort: skip

import bed
import checkpoints
from cases import CASES, SMOKE, known_fault


def main() -> int:
    options = _parse()
    chosen = SMOKE if options.smoke else CASES
    if options.case:
        chosen = [name for pattern in options.case for name in fnmatch.filter(CASES, pattern)]
    if not chosen:
        sys.exit(f"no case is called {' or '.join(options.case)}")
    start, count, unexpected = time.monotonic(), 0, 0
    jobs = sorted((CASES[name].model, seed, name) for name in chosen for seed in options.seeds)
    with tempfile.TemporaryDirectory(prefix="bed-") as folder:
        for model, its_jobs in groupby(jobs, key=lambda job: job[0]):
            checkpoint = checkpoints.write(model, Path(folder, model))
            runs = [(seed, CASES[name]) for _, seed, name in its_jobs]
            answers = bed.cold_answers(checkpoint, [case.script(seed) for seed, case in runs])
            for (seed, case), expected in zip(runs, answers):
                outcome = bed.run(case, seed, checkpoint, expected, spec=options.spec)
                count += 1
                unexpected += _show(outcome, seed, options.spec)
    minutes = (time.monotonic() - start) / 60
    print(
        f"{RELEASE}: {count} cases in {60 * minutes:.0f} s ({count / minutes:.1f} a minute), "
        f"{unexpected} unexpected"
    )
    return int(unexpected > 0)


def _show(outcome: bed.Outcome, seed: int, spec: str) -> bool:
    print(outcome, flush=True)
    known = known_fault(outcome.case)
    for failure in [*outcome.wrong[:3], *outcome.problems[:5]]:
        print(f"    {failure}")
    if outcome.failures:
        faulty = "" if spec == "HostMemorySpec" else f" --spec {spec}"
        print(f"    repeat: python -m tests.engine --seed {seed} --case {outcome.case}{faulty}")
    if known:
        print(f"    known: {known}" + ("" if outcome.failures else ", but nothing failed"))
    return bool(outcome.failures) and not known


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.engine", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--repeat", type=int, default=1, help="how many seeds")
    parser.add_argument("--case", action="append", help="only cases of this name or pattern")
    parser.add_argument("--smoke", action="store_true", help="those of `make test`")
    parser.add_argument("--spec", default="HostMemorySpec", help="a faulty backend")
    options = parser.parse_args()
    options.seeds = range(options.seed, options.seed + options.repeat)
    return options


if __name__ == "__main__":
    sys.exit(main())
