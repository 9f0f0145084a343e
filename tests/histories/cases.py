"""Named kinds of histories."""

import shlex
import time
from dataclasses import dataclass, field
from typing import Any

from .findings import Violation
from .generate import random_history
from .geometry import GEOMETRIES
from .history import History
from .shrink import failure_of
from .world import Report, replay

_GEMMA4 = [
    "gemma4-31b",
    "gemma4-31b-tp8",
    "gemma4-26b-a4b",
    "gemma4-12b",
    "gemma4-e4b",
    "gemma4-e2b",
]
# A GPU pool for a few requests and a host tier for more of them; what the GPU forgets comes
# back from the host.
_ROOMY = {
    "gpu_ratio": [1.5, 2.0],
    "max_requests": [1, 3],
    "host_ratio": [3.0, 10.0],
    "resets": 0.0,
    "floods": [0.2, 0.4],
    "repeats": [0.3, 0.6],
    "length": [4, 8, 12],
}

# What is given to `random_history`; a list is a choice.
_THEMES: dict[str, dict[str, Any]] = {
    "tight-gpu": {
        "gpu_ratio": [1.0, 1.1, 1.5],
        "max_requests": 8,
        "host_ratio": 10.0,
        "resets": 0.0,
        "floods": [0.1, 0.3],
        "repeats": [0.4, 0.7],
        "length": [8, 12],
        "texts": [1, 2],
    },
    "preemptions": {
        "gpu_ratio": [1.0, 1.1, 1.5],
        "max_requests": 8,
        "host_ratio": 10.0,
        "resets": 0.0,
        "floods": 0.0,
        "length": [2, 4, 8],
        "answers": (100, 300),
        "texts": [1, 2],
    },
    "tight-host": {"host_ratio": [0.02, 0.1, 0.3], "gpu_ratio": 2.0, "resets": 0.0},
    "chunks": {**_ROOMY, "blocks_per_chunk": [2, 8, 16, 32]},
    "resets": {**_ROOMY, "resets": 0.3},
    "aborts": {**_ROOMY, "aborts": 0.4},
    "slow-copies": {
        **_ROOMY,
        "store_delay": [(5, 20), (20, 60)],
        "load_delay": [(5, 20)],
        "workers": [2, 3],
    },
    "pipeline": {**_ROOMY, "workers": [2, 3], "stages": True, "async_scheduling": False},
    "failing-copies": {**_ROOMY, "fail_every": [3, 10]},
    "no-prefix-caching": {**_ROOMY, "prefix_caching": False},
    "keep-all": {**_ROOMY, "retention": "all", "prompt_only": False},
    "checkpoints": {**_ROOMY, "retention": [512, 2048]},
    "sync-loads": {**_ROOMY, "sync_load_bytes": 1 << 40},
    "runner-v2": {**_ROOMY, "runner": "v2"},
    "images": {
        **_ROOMY,
        "images": 1.0,
        "texts": [1, 2],
        "bidirectional": [False, True],
        "budget": [512, 2048, 8192],
    },
    "salts-and-adapters": {**_ROOMY, "kinds": 0.6, "texts": [1, 2]},
    "hybrid-off": {**_ROOMY, "hybrid": False},
    "long-context": {
        "window_divisor": 1,
        "max_model_len": 131072,
        "budget": 8192,
        "gpu_ratio": 1.5,
        "host_ratio": 2.0,
        "length": 4,
        "chat": 0.7,
        "answers": (4,),
        "resets": 0.0,
        "workers": 1,
    },
}
# Those that also run on a model with one group.
_CONTROLS = (
    "tight-gpu",
    "preemptions",
    "tight-host",
    "chunks",
    "resets",
    "aborts",
    "slow-copies",
    "pipeline",
    "failing-copies",
)
_CASES: dict[str, dict[str, Any]] = {
    "anything": {
        "geometry": list(GEOMETRIES),
        "blocks_per_chunk": [1, 1, 1, 2, 8],
        "prefix_caching": [True] * 9 + [False],
    },
    **{name: {**_ROOMY, "geometry": name} for name in _GEMMA4},
    "one-group": {**_ROOMY, "geometry": "qwen3-32b"},
    "two-groups": {**_ROOMY, "geometry": ["gemma3-27b", "gpt-oss-20b"]},
    **{name: {"geometry": _GEMMA4, **given} for name, given in _THEMES.items()},
    **{f"{name}-one-group": {**_THEMES[name], "geometry": "qwen3-32b"} for name in _CONTROLS},
    # A window is shorter than a chunk and may lie in two.
    "chunks-short-window": {
        **_THEMES["chunks"],
        "geometry": ["gpt-oss-20b", "gemma4-e2b"],
        "window_divisor": 1,
        "max_model_len": 8192,
        "blocks_per_chunk": [16, 32],
        "budget": [256, 512, 1000],
    },
}
CASES = {name: {"case": name, **given} for name, given in _CASES.items()}
# Cases of settings that a pin does not have.
_ABSENT = {"v0.19.1": {"keep-all", "checkpoints", "sync-loads", "runner-v2"}, "v0.33.0": set()}


def cases_of(pin: str) -> list[str]:
    return [name for name in CASES if name not in _ABSENT[pin]]


def geometries_of(case: str) -> list[str]:
    geometry = CASES[case]["geometry"]
    return geometry if isinstance(geometry, list) else [geometry]


def history(case: str, geometry: str, seed: int, **given: Any) -> History:
    """The history of this seed; settings or parts of the mix may be given."""
    return random_history(seed, {**CASES[case], "geometry": geometry, **given})


def command(case: str, geometry: str, seed: int, **given: Any) -> str:
    """What repeats that history."""
    settings = [f" --set {shlex.quote(f'{name}={value!r}')}" for name, value in given.items()]
    return (
        f"python -m tests.histories --case {case} --geometry {geometry} --seed {seed} "
        f"--histories 1{''.join(settings)}"
    )


def try_history(history: History) -> tuple[Report, Violation | None]:
    """Replay a history: what happened if it is good, and how it fails if not."""
    report = Report()
    violation = failure_of(history, lambda history: report.add(replay(history)))
    return report, violation


@dataclass
class Portion:
    """Some histories of one case on one geometry, and what became of them."""

    case: str
    geometry: str
    seeds: range
    given: dict[str, Any]
    report: Report = field(default_factory=Report)
    # Of the processor.
    seconds: float = 0.0
    # By seed: invariant and message.
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)

    def history(self, seed: int) -> History:
        return history(self.case, self.geometry, seed, **self.given)

    def replay(self) -> "Portion":
        start = time.process_time()
        for seed in self.seeds:
            report, violation = try_history(self.history(seed))
            self.report.add(report)
            if violation is not None:
                self.failures[seed] = violation.invariant, violation.message
        self.seconds = time.process_time() - start
        return self
