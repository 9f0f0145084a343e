"""Named kinds of histories."""

from typing import Any

from .findings import Violation
from .generate import random_history
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
    "gpu_ratio": [2.0, 3.0],
    "max_requests": [1, 3],
    "host_ratio": [3.0, 10.0],
    "resets": 0.0,
    "floods": [0.2, 0.4],
    "length": [8, 16],
}

# What is given to `random_history`; a list is a choice. `themes` run on Gemma 4 and, as a
# control, on a model with one group.
_THEMES: dict[str, dict[str, Any]] = {
    "tight-gpu": {
        "gpu_ratio": [1.0, 1.1, 1.5],
        "max_requests": 8,
        "host_ratio": 10.0,
        "resets": 0.0,
        "floods": [0.1, 0.3],
        "length": 16,
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
    "pipeline": {**_ROOMY, "workers": [2, 3], "stages": True},
    "failing-copies": {**_ROOMY, "fail_every": [3, 10]},
    "no-prefix-caching": {**_ROOMY, "prefix_caching": False},
    "keep-all": {**_ROOMY, "retention": "all", "prompt_only": False},
    "checkpoints": {**_ROOMY, "retention": [512, 2048]},
    "sync-loads": {**_ROOMY, "sync_load_bytes": 1 << 40},
    "runner-v2": {**_ROOMY, "runner": "v2"},
    "hybrid-off": {**_ROOMY, "hybrid": False},
    "long-context": {
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
_CONTROLS = (
    "tight-gpu",
    "tight-host",
    "chunks",
    "resets",
    "aborts",
    "slow-copies",
    "pipeline",
    "failing-copies",
)
CASES: dict[str, dict[str, Any]] = {
    **{name: {**_ROOMY, "geometry": name} for name in _GEMMA4},
    "one-group": {**_ROOMY, "geometry": "qwen3-32b"},
    "two-groups": {**_ROOMY, "geometry": ["gemma3-27b", "gpt-oss-20b"]},
    **{name: {"geometry": _GEMMA4, **given} for name, given in _THEMES.items()},
    **{f"{name}-one-group": {**_THEMES[name], "geometry": "qwen3-32b"} for name in _CONTROLS},
    # The window is as long as a chunk.
    "chunks-short-window": {
        **_THEMES["chunks"],
        "geometry": "gpt-oss-20b",
        "blocks_per_chunk": [8, 16],
    },
}
# Cases of settings that a pin does not have.
_ABSENT = {"v0.19.1": {"keep-all", "checkpoints", "sync-loads", "runner-v2"}, "v0.33.0": set()}


def cases_of(pin: str) -> list[str]:
    return [name for name in CASES if name not in _ABSENT[pin]]


def history(case: str, seed: int) -> History:
    return random_history(seed, CASES[case])


def run_case(case: str, seeds: range) -> tuple[Report, dict[int, Violation]]:
    """Replay a case's histories: what happened in the good ones, and how the others fail."""
    report, failures = Report(), {}
    for seed in seeds:
        failure = failure_of(history(case, seed), lambda h: report.add(replay(h)))
        if failure is not None:
            failures[seed] = failure
    return report, failures
