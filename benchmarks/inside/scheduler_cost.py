"""CPU time of the scheduler's side of a connector, on one tree of vLLM."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from tests.histories.geometry import GEOMETRIES

from .engine import Engine, Setup

_METHODS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
)
_PREFILL = 1 << 17
_TAIL = 40


class _Clock:
    """CPU time that a scheduler spends in its connector."""

    def __init__(self, connector: Any) -> None:
        self.spent = 0
        for name in _METHODS:
            if hasattr(connector, name):
                setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time_ns()
            try:
                return method(*arguments, **named)
            finally:
                self.spent += time.thread_time_ns() - start

        return timed


class _Case:
    """Some requests of one length on an engine of their own.

    Args:
        geometry: of the model.
        requests: how many are running.
        context: tokens of each, about: no two are equally far in their last block.
        evicting: whether the host tier is full, so that each store must evict something.
        budget: tokens computed in one step.
    """

    def __init__(
        self, geometry: str, requests: int, context: int, evicting: bool, budget: int
    ) -> None:
        window = GEOMETRIES[geometry].window
        tokens = context + 1024
        # In blocks of 16 tokens, the smallest there are; a bit more is no harm.
        of_request = tokens // 16 + 2
        groups = 1
        if window is not None:
            groups = 6
            of_request += groups * (window // 16 + 2)
        blocks = of_request * (requests + 2) + groups * 2 * budget // 16 + 2
        # What is being generated must have room, whatever is evicted.
        kept = requests * (tokens // 16 + (groups - 1) * 2 * (window or 0) // 16)
        setup = Setup(
            geometry=geometry,
            host_blocks=kept * 5 // 4 + 1024,
            gpu_blocks=blocks,
            max_model_len=context + (1 << 16),
            budget=budget,
            max_requests=requests + 2,
        )
        self.engine = engine = Engine(setup)
        self.period = lcm(*(group.block_size for group in engine.groups))
        self.clock = _Clock(engine.connector)
        self.rng = np.random.default_rng(1)
        self.context = context
        self.prompts = [
            self.rng.integers(0, 256, context + i % self.period - self.period).tolist()
            for i in range(requests)
        ]

        if evicting:
            self._fill_host()

    def _fill_host(self) -> None:
        """Fill the host tier with blocks that nobody asks for."""
        manager = self.engine.connector.connector_scheduler.manager
        group = (len(self.engine.groups) - 1).to_bytes(4, "big")
        while free := manager._get_num_free_blocks():
            keys = [self.rng.bytes(32) + group for _ in range(min(free, 4096))]
            manager.prepare_store(keys)
            manager.complete_store(keys)

    def prefill(self) -> float:
        """Compute all prompts and store them. Returns CPU time per 1024 tokens.

        Until the requests have ended, as some connectors then complete their stores.
        """
        self.clock.spent = 0
        requests = [
            self.engine.add(f"p{i}", prompt, 1) for i, prompt in enumerate(self.prompts)
        ]
        while not all(request.is_finished() for request in requests):
            self.engine.step(_one_token)
        self.engine.settle()
        return self.clock.spent / sum(map(len, self.prompts)) * 1024

    def begin(self) -> None:
        """Bring requests with these prompts to where they generate."""
        for i, prompt in enumerate(self.prompts):
            self.engine.add(f"r{i}", prompt, 1 << 16)
        while any(r.num_output_tokens == 0 for r in self.engine.requests.values()):
            self.engine.step(_one_token)

    def decode(self, steps: int) -> list[tuple[int, int]]:
        """CPU time of each step: in the connector, and in all of the scheduler."""
        return [self.timed_step() for _ in range(steps)]

    def timed_step(self) -> tuple[int, int]:
        self.clock.spent = 0
        start = time.thread_time_ns()
        self.engine.step(_one_token)
        return self.clock.spent, time.thread_time_ns() - start


def _one_token(request: Any) -> list[int]:
    return [1]


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


_case: _Case | None = None


def start(geometry: str, requests: int, context: int, evicting: bool) -> dict[str, Any]:
    """Bring requests to where they generate."""
    global _case
    if _case is not None:
        _case.engine.close()
        _case = None
        gc.collect()
    case = _Case(geometry, requests, context, evicting, _PREFILL)
    with _no_collection():
        prefill = case.prefill()
        case.begin()
        case.decode(2 * case.period)
    _case = case
    return {"prefill_ns_per_1024": prefill, "period": case.period}


def decode(steps: int) -> list[tuple[int, int]]:
    """Steps of the case that was started."""
    assert _case is not None
    with _no_collection():
        return _case.decode(steps)


def look_ups(repeats: int) -> dict[str, list[int]]:
    """Look-ups of requests whose prompt the host tier holds, on the case's engine.

    Returns:
        By kind, CPU times. `hit`: all is there; `half`: the GPU has the first half; `miss`:
        nothing is there; `resume`: a hit, with what it takes to begin the load.
    """
    assert _case is not None
    case, engine = _case, _case.engine
    if engine.scheduler.running:
        names = list(engine.requests)
        engine.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        engine.settle()
    connector = engine.connector
    prompt = case.prompts[0]
    half = len(prompt) // 2 // 512 * 512
    times: dict[str, list[int]] = {"hit": [], "half": [], "miss": [], "resume": []}
    with _no_collection():
        for i in range(repeats):
            seen = [*prompt, *case.rng.integers(0, 256, _TAIL).tolist()]
            fresh = case.rng.integers(0, 256, len(seen)).tolist()
            for kind, tokens, local in (
                ("hit", seen, 0),
                ("half", seen, half),
                ("miss", fresh, 0),
            ):
                request = engine.request(f"{kind}{len(engine.requests)}{i}", tokens, 1)
                before = time.thread_time_ns()
                found, _ = connector.get_num_new_matched_tokens(request, local)
                times[kind].append(time.thread_time_ns() - before)
                if (kind == "miss") != (not found):
                    raise AssertionError(f"a {kind} found {found} of {len(tokens)} tokens")
            engine.scheduler.reset_prefix_cache()
            engine.add(f"resume{len(engine.requests)}{i}", seen, 1)
            times["resume"].append(case.timed_step()[0])
            engine.settle()
    return times


def churn(geometry: str, requests: int, context: int, steps: int, evicting: bool) -> Any:
    """Steps while requests end and others, as long, take their places.

    Returns:
        CPU time of each step: in the connector, and in all of the scheduler.
    """
    global _case
    _case = None
    gc.collect()
    case = _Case(geometry, requests, context, evicting, 8192)
    engine = case.engine
    with _no_collection():
        # Answers of many lengths, so that a request ends in about every second step.
        for i, prompt in enumerate(case.prompts):
            engine.add(f"r{i}", prompt, requests * context // 8192 + 2 + 2 * i)
        while any(r.num_output_tokens == 0 for r in list(engine.requests.values())):
            engine.step(_one_token)
        times = []
        for i in range(steps):
            if len(engine.scheduler.running) + len(engine.scheduler.waiting) < requests:
                prompt = case.rng.integers(0, 256, context + i % case.period).tolist()
                engine.add(f"n{i}", prompt, 4 * requests)
            times.append(case.timed_step())
    engine.close()
    return times
