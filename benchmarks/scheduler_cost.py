"""CPU time that the scheduler spends in its connector, against the release as published.

Each subject is a process of its own. They make their steps in turns, so that whatever else
the machine does hits all alike; what counts is CPU time, and the median of the rounds.
"""

import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .results import table
from .workers import STOCK, Worker

PIN = "v0.19.1"
ONE_GROUP, GEMMA = "qwen3-32b", "gemma4-31b"
# Steps in a round: every request comes to the end of a block as often as the others.
_STEPS = 64
_REQUESTS = (1, 4, 16, 64, 256)
_CONTEXTS = (1024, 8192, 32768, 131072)
_USUAL_REQUESTS, _USUAL_CONTEXT = 16, 8192
_CHURN = {"requests": 256, "context": 2048, "steps": 100}


@dataclass(frozen=True)
class Case:
    requests: int
    context: int
    evicting: bool = False


def cases(quick: bool = False) -> list[Case]:
    requests = (16, 256) if quick else _REQUESTS
    contexts = (8192, 131072) if quick else _CONTEXTS
    grid = [Case(n, _USUAL_CONTEXT) for n in requests]
    grid += [Case(_USUAL_REQUESTS, c) for c in contexts if c != _USUAL_CONTEXT]
    return [*grid, Case(64, _USUAL_CONTEXT, evicting=True)]


def measure(
    tree: str | None, stock: str = STOCK, rounds: int = 5, quick: bool = False
) -> dict[str, Any]:
    """Run all cases.

    Args:
        tree: of vLLM, None for the installed wheel.
        stock: tree to compare with.
        rounds: how often each case is measured.
        quick: fewer cases, for use while the code is being changed.
    """
    with (
        Worker(PIN, stock) as theirs,
        Worker(PIN, tree) as ours,
        Worker(PIN, tree) as gemma,
        ThreadPoolExecutor(2) as pool,
    ):
        subjects = {
            "stock": (theirs, ONE_GROUP),
            "one group": (ours, ONE_GROUP),
            "31B": (gemma, GEMMA),
        }
        measured = []
        for case in cases(quick):
            done = _measure_case(case, subjects, rounds, pool)
            measured.append(done)
            print(_progress(done), flush=True)
        churn = _measure_churn(subjects, 1 if quick else 3)
    return {"cases": measured, "churn": churn, "growth": _growth(measured)}


def _measure_case(
    case: Case, subjects: dict[str, tuple[Worker, str]], rounds: int, pool: ThreadPoolExecutor
) -> dict[str, Any]:
    def begin(worker: Worker, geometry: str) -> dict[str, Any]:
        return worker.call("scheduler_cost.start", geometry=geometry, **vars(case))

    started = list(pool.map(lambda subject: begin(*subject), subjects.values()))
    steps: dict[str, list[list[list[int]]]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, (worker, _) in subjects.items():
            steps[name].append(worker.call("scheduler_cost.decode", steps=_STEPS))
    result: dict[str, Any] = {**vars(case), "subjects": {}}
    looks: dict[str, dict[str, list[int]]] = {name: {} for name in subjects}
    for _ in range(rounds):
        for name, (worker, _) in subjects.items():
            for kind, times in worker.call("scheduler_cost.look_ups", repeats=2).items():
                looks[name].setdefault(kind, []).extend(times)
    for (name, turns), start in zip(steps.items(), started, strict=True):
        result["subjects"][name] = {
            "step_us": statistics.median(_mean(turn, 0) for turn in turns),
            "scheduler_us": statistics.median(_mean(turn, 1) for turn in turns),
            "worst_step_us": _worst([[t[0] for t in turn] for turn in turns]),
            "prefill_us_per_1024_tokens": start["prefill_ns_per_1024"] / 1e3,
            "look_up_us": {
                kind: statistics.median(times) / 1e3 for kind, times in looks[name].items()
            },
        }
    return result


def _mean(turn: list[list[int]], column: int) -> float:
    return statistics.fmean(times[column] for times in turn) / 1e3


def _worst(turns: list[list[int]]) -> float:
    """The slowest of a round's steps, each at its median over the rounds, in microseconds.

    All rounds do the same: what is slow once only is not the work's fault.
    """
    return max(statistics.median(times) for times in zip(*turns, strict=True)) / 1e3


def _measure_churn(
    subjects: dict[str, tuple[Worker, str]], repeats: int
) -> dict[str, dict[str, float]]:
    """Requests come and go while the host tier is full, the same in every repeat."""
    turns: dict[str, list[list[int]]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, (worker, geometry) in subjects.items():
            times = worker.call(
                "scheduler_cost.churn", geometry=geometry, evicting=True, **_CHURN
            )
            turns[name].append([connector for connector, _ in times])
    return {
        name: {
            "step_us": statistics.median(statistics.fmean(t) / 1e3 for t in times),
            "worst_step_us": _worst(times),
        }
        for name, times in turns.items()
    }


def _growth(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Exponents: with twice as much of one thing, a cost is 2 ** exponent as high."""

    def fit(cases: list[dict[str, Any]], by: str, subject: str, *path: str) -> float | None:
        points = []
        for case in cases:
            value = case["subjects"][subject]
            for key in path:
                value = value[key]
            points.append((math.log(case[by]), math.log(value)))
        if len(points) < 2:
            return None
        return statistics.linear_regression(*zip(*points, strict=True)).slope

    steady = [case for case in measured if not case["evicting"]]
    by_requests = [c for c in steady if c["context"] == _USUAL_CONTEXT]
    by_context = [c for c in steady if c["requests"] == _USUAL_REQUESTS]
    return {
        subject: {
            "step by requests": fit(by_requests, "requests", subject, "step_us"),
            "step by context": fit(by_context, "context", subject, "step_us"),
            "look-up by context": fit(by_context, "context", subject, "look_up_us", "hit"),
        }
        for subject in measured[0]["subjects"]
    }


def _progress(case: dict[str, Any]) -> str:
    ours, stock = case["subjects"]["one group"], case["subjects"]["stock"]
    gemma = case["subjects"]["31B"]
    return (
        f"{case['requests']:>4} x {case['context']:>6}{' evicting' if case['evicting'] else ''}"
        f": step {stock['step_us']:.0f} / {ours['step_us']:.0f} / {gemma['step_us']:.0f} us, "
        f"look-up {stock['look_up_us']['hit']:.0f} / {ours['look_up_us']['hit']:.0f} / "
        f"{gemma['look_up_us']['hit']:.0f} us (stock / one group / 31B)"
    )


def targets(data: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What was to be reached: name, target, measured, whether it is met."""
    rows = []
    for what, path in (
        ("step", ("step_us",)),
        ("prefill", ("prefill_us_per_1024_tokens",)),
        ("look-up, hit", ("look_up_us", "hit")),
        ("look-up, miss", ("look_up_us", "miss")),
        ("begin of a load", ("look_up_us", "resume")),
    ):
        ratios = sorted(
            _value(c, "one group", path) / _value(c, "stock", path) for c in data["cases"]
        )
        middle = statistics.median(ratios)
        rows.append(
            (
                f"{what}: one group / stock, median of the cases",
                "at most 1.10",
                f"{middle:.2f} (worst case {ratios[-1]:.2f})",
                middle <= 1.10,
            )
        )
    longest = max(data["cases"], key=lambda c: c["context"])
    looked = {name: s["look_up_us"]["hit"] for name, s in longest["subjects"].items()}
    ratio = looked["31B"] / looked["one group"]
    rows.append(
        (
            f"look-up of {longest['context'] // 1024}k: 31B / one group",
            "at most 3",
            f"{ratio:.2f} ({looked['31B']:.0f} us; stock {looked['stock']:.0f} us)",
            ratio <= 3,
        )
    )
    most = max((c for c in data["cases"]), key=lambda c: c["requests"])
    for name in ("one group", "31B"):
        for what, measured in (
            (f"{most['requests']} generating", most["subjects"]),
            (f"{_CHURN['requests']} running, some come and go", data["churn"]),
        ):
            worst = measured[name]["worst_step_us"] / 1e3
            stock = measured["stock"]["worst_step_us"] / 1e3
            rows.append(
                (
                    f"slowest step, {what}, {name}",
                    "at most 2 ms",
                    f"{worst:.2f} ms (stock, one group: {stock:.2f})",
                    worst <= 2,
                )
            )
    return rows


def _value(case: dict[str, Any], subject: str, path: tuple[str, ...]) -> float:
    value = case["subjects"][subject]
    for key in path:
        value = value[key]
    return value


def tables(data: dict[str, Any]) -> str:
    names = list(data["cases"][0]["subjects"])

    def rows(*path: str) -> list[list[Any]]:
        return [
            [f"{c['requests']} x {c['context'] // 1024}k"
             + (", tier full" if c["evicting"] else "")]
            + [_value(c, name, path) for name in names]
            for c in data["cases"]
        ]  # fmt: skip

    head = ["requests x context", *names]
    parts = [
        "CPU time in the connector per step that generates, in microseconds:",
        table(head, rows("step_us")),
        "The slowest of 64 such steps:",
        table(head, rows("worst_step_us")),
        "All of the scheduler and the connector's worker side, per step:",
        table(head, rows("scheduler_us")),
        "Per 1,024 tokens of prompts computed:",
        table(head, rows("prefill_us_per_1024_tokens")),
    ]
    for kind, text in (
        ("hit", "Look-up of a prompt that is all in the host tier:"),
        ("half", "Look-up when the GPU has the first half:"),
        ("miss", "Look-up of a prompt that nobody has seen:"),
        ("resume", "Look-up and start of the load:"),
    ):
        parts += [text, table(head, rows("look_up_us", kind))]
    parts += [
        (f"{_CHURN['requests']} running requests of {_CHURN['context']} tokens, one of which "
        "ends in about every second step and another begins, the host tier full:"),
        table(["", *names], [
            ["per step", *(data["churn"][n]["step_us"] for n in names)],
            ["slowest step", *(data["churn"][n]["worst_step_us"] for n in names)],
        ]),
        "Growth exponents:",
        table(["", *names], [
            [what, *(data["growth"][n][what] for n in names)]
            for what in data["growth"][names[0]]
        ]),
    ]  # fmt: skip
    return "\n\n".join(parts)
