"""Replays a trace on the scheduler and connector of the pin."""

import functools
import gc
import heapq
import time
from collections import deque
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from benchmarks import traces

from . import policies
from .engine import Engine, Setup

# What a GPU of today does, about; the clock that loads and evictions happen by.
PREFILL_TOKENS_PER_SECOND = 10_000
SECONDS_PER_GENERATED_TOKEN = 0.03
_STUCK = 100
# Tokens computed in one step.
_BUDGET = 8192


@functools.lru_cache(maxsize=2)
def _turns(trace: str | None, part: int, seed: int) -> list[traces.Turn]:
    if trace is None:
        return traces.make_chats(seed=seed)
    return traces.read(Path(trace), part, seed)


def _hash(value: tuple) -> bytes:
    """Stands for SHA-256, which takes longer than all the rest."""
    before, tokens, _ = value
    return (hash((before, tokens)) & (1 << 64) - 1).to_bytes(8, "big")


class _Replay:
    """One engine and the requests that it serves.

    Without a GPU pool of its own size the engine serves one request after the other and
    keeps nothing of it on the GPU: all that comes back comes from the host tier. With one,
    requests arrive and generate by a clock, and the GPU keeps what it has room for.
    """

    def __init__(self, engine: Engine, turns: list[traces.Turn], timed: bool) -> None:
        self.engine = engine
        self.timed = timed
        self.now = 0.0
        self.to_come = deque(enumerate(turns))
        self.answers: list[tuple[float, str]] = []
        self.generating: set[str] = set()
        self.live: set[str] = set()
        self.prompt_tokens = 0
        self.preemptions = 0

    def run(self) -> None:
        idle = 0
        while self.to_come or self.live:
            self._arrive()
            moved = self._step()
            idle = 0 if moved else idle + 1
            if idle >= 3:
                self._wait()
            if idle > _STUCK:
                raise RuntimeError(f"{sorted(self.live)[:5]} do not end")

    def _arrive(self) -> None:
        while self.to_come and (
            not self.live if not self.timed else self.to_come[0][1].arrival <= self.now
        ):
            if not self.timed:
                self.engine.forget_gpu()
            number, turn = self.to_come.popleft()
            prompt = list(traces.pieces_tokens(turn.prompt))
            name = f"r{number}"
            self.live.add(name)
            self.prompt_tokens += len(prompt)
            self.engine.add(name, prompt, turn.answer.length).answer = turn.answer.tokens()
        while self.answers and self.answers[0][0] <= self.now:
            _, name = heapq.heappop(self.answers)
            request = self.engine.requests[name]
            request.append_output_token_ids(list(request.answer[:-1]))

    def _step(self) -> bool:
        step = self.engine.step(self._say)
        computed = step.total_num_scheduled_tokens
        self.now += computed / PREFILL_TOKENS_PER_SECOND
        self.preemptions += len(step.preempted_req_ids or ())
        for name in [n for n in self.live if self.engine.requests[n].is_finished()]:
            self.live.remove(name)
            del self.engine.requests[name]
        return bool(computed)

    def _say(self, request: Request) -> list[int]:
        missing = request.max_tokens - request.num_output_tokens
        if missing == 1:
            return [request.answer[-1]]
        if not self.timed:
            return list(request.answer[:-1])
        # The blocks stay with the request for as long as a GPU would take.
        name = request.request_id
        if name not in self.generating:
            self.generating.add(name)
            due = self.now + missing * SECONDS_PER_GENERATED_TOKEN
            heapq.heappush(self.answers, (due, name))
        return []

    def _wait(self) -> None:
        """Nothing moves before the next thing happens."""
        times = [self.answers[0][0]] if self.answers else []
        if self.to_come:
            times.append(self.to_come[0][1].arrival)
        if times:
            self.now = max(self.now, min(times))


def replay(
    policy: str,
    geometry: str,
    host_bytes: int,
    gpu_bytes: int | None,
    trace: str | None,
    part: int = 1,
    seed: int = 0,
    turns: int | None = None,
) -> dict[str, Any]:
    """Replay a trace and count what came back from the host tier.

    Args:
        policy: a name in `policies`.
        geometry: of the model.
        host_bytes: size of the host tier.
        gpu_bytes: what the GPU keeps; None for nothing, see `_Replay`.
        trace: path of a trace, None for made-up chats.
        part: one in so many of the trace's sessions.
        seed: chooses them, or makes the chats.
        turns: only the first so many requests.
    """
    to_come = _turns(trace, part, seed)[:turns]
    longest = max(turn.prompt_length + turn.answer.length for turn in to_come)
    engine = Engine(
        Setup(
            geometry,
            host_bytes=host_bytes,
            gpu_bytes=gpu_bytes,
            max_model_len=longest + 16,
            budget=_BUDGET,
            max_requests=256 if gpu_bytes else 1,
            hash_block=_hash,
            **policies.options(policy),
        )
    )
    policies.change(policy, engine)
    began = time.process_time()
    gc.collect()
    gc.disable()
    try:
        run = _Replay(engine, to_come, timed=gpu_bytes is not None)
        run.run()
    finally:
        gc.enable()
    local = sum(on_gpu for on_gpu, _ in engine.restored.values())
    loaded = sum(external for _, external in engine.restored.values())
    result = {
        "prompt_tokens": run.prompt_tokens,
        "on_gpu": local / run.prompt_tokens,
        "restored": loaded / run.prompt_tokens,
        "requests": len(to_come),
        "preemptions": run.preemptions,
        "gpu_bytes": engine.num_blocks * engine.bytes_per_block,
        "cpu_seconds": time.process_time() - began,
        "clock_seconds": run.now,
        **engine.copies.totals(),
    }
    engine.close()
    return result
