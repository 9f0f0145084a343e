"""The cases of the bed: every variant, on every model."""

from dataclasses import dataclass, field, replace
from typing import Any

from checkpoints import MODELS
from engines import BLOCK_SIZE
from environment import RELEASE
from workloads import Script, Workload


@dataclass(frozen=True)
class Case:
    """A model, settings and a workload.

    Attributes:
        gpu: GPU blocks, in requests of the longest kind that have room there.
        host: host memory, in the same measure.
        settings: of the engine.
        hostility: of the host memory.
        reloads: whether reloads must have happened.
        preempts: whether preemptions must have happened.
    """

    name: str
    model: str
    workload: Workload = field(default_factory=Workload)
    gpu: float = 2.5
    host: float = 12.0
    blocks_per_chunk: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    hostility: dict[str, Any] = field(default_factory=dict)
    reloads: bool = True
    preempts: bool = False

    def script(self, seed: int) -> Script:
        """What is asked, for a seed."""
        shape = MODELS[self.model]
        sizes = {BLOCK_SIZE, *shape.block_sizes(BLOCK_SIZE)}
        units = sizes | {size * self.blocks_per_chunk for size in sizes}
        units |= {window for window, _ in shape.caches() if window}
        return self.workload.script(f"{seed} {self.name}", tuple(sorted(units)))


SLOW = {"delay": (0, 8)}
_BASE = {"max_num_batched_tokens": 128, "async_scheduling": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "slow": {"hostility": SLOW},
    # Only when somebody waits, or long after.
    "lazy": {"hostility": {"delay": (20, 20)}},
    "boundaries": {"hostility": SLOW, "workload": Workload(boundaries=True)},
    "chunks-2": {"hostility": SLOW, "blocks_per_chunk": 2},
    "chunks-3": {
        "hostility": SLOW,
        "blocks_per_chunk": 3,
        "workload": Workload(longest=512),
        "reloads": False,
    },
    "chunks-8": {
        "hostility": SLOW,
        "blocks_per_chunk": 8,
        "workload": Workload(requests=20, families=2, longest=800, gap=(0, 3)),
        "reloads": False,
    },
    "small-budget": {"hostility": SLOW, "settings": {"max_num_batched_tokens": 40}},
    "preemption": {
        "hostility": SLOW,
        "gpu": 1.7,
        "settings": {"max_num_seqs": 8},
        "workload": Workload(longest=192, answer=(24, 96), gap=(0, 1), chats=0.1, crowd=8),
        "preempts": True,
    },
    "starving": {
        "hostility": SLOW,
        "gpu": 1.15,
        "workload": Workload(gap=(0, 2), answer=(8, 40)),
    },
    "burst": {
        "hostility": SLOW,
        "gpu": 6.0,
        "settings": {"max_num_seqs": 8},
        "workload": Workload(requests=24, families=2, gap=(0, 1), resets=0.1),
    },
    "aborts": {"hostility": SLOW, "workload": Workload(requests=24, aborts=0.4, gap=(0, 3))},
    "tiny-host": {"hostility": SLOW, "host": 0.6, "reloads": False},
    "resets": {"hostility": SLOW, "workload": Workload(resets=0.3, hard_resets=True)},
    "no-prefix-caching": {
        "hostility": SLOW,
        "settings": {"enable_prefix_caching": False},
        "workload": Workload(chats=0.4),
    },
    "async-scheduling": {
        "hostility": SLOW,
        "settings": {"async_scheduling": True},
        "workload": Workload(gap=(0, 3), aborts=0.1),
    },
    "chats": {"hostility": SLOW, "workload": Workload(requests=20, chats=0.8, gap=(2, 8))},
    "failing-copies": {"hostility": {**SLOW, "fail_every": 7}},
}


def _case(model: str, variant: str) -> Case:
    case = Case(f"{model}/{variant}", model)
    given = VARIANTS[variant]
    return replace(case, **{**given, "settings": _BASE | given.get("settings", {})})


CASES = {
    case.name: case for case in (_case(model, name) for model in MODELS for name in VARIANTS)
}
# One text, but blocks that are not the same. Copies are prompt and there is room for all, so
# that the last round must find what it asks for again.
CASES |= {
    case.name: case
    for case in (
        replace(
            _case(model, "plain"),
            name=f"{model}/told-apart",
            workload=Workload(families=2, chats=0.0, told_apart=kinds),
            gpu=4.0,
            host=30.0,
        )
        for model, kinds in {
            "qwen3": ("adapter", "salt", "salt"),
            "gemma3": ("adapter", "salt", "salt"),
            "gemma4-31b": ("picture", "picture", "salt"),
            "gemma4-12b": ("picture", "picture", "salt"),
            "gemma4-e4b": ("salt", "salt"),
        }.items()
    )
}

# --- what `make test` runs ---

SEED = 1
TOLD_APART = ["gemma4-31b/told-apart", "qwen3/told-apart"]
SMOKE = [
    *TOLD_APART,
    "gemma3/burst",
    "gemma4-26b-a4b/chats",
    "gemma4-31b/boundaries",
    "gemma4-31b/chunks-2",
    "gemma4-31b/preemption",
    "gemma4-e4b/aborts",
    "gemma4-e4b/small-budget",
    "qwen3/async-scheduling",
]
BITTEN = ["gemma4-31b/chunks-2", "qwen3/async-scheduling"]
UNPROTECTED = "gemma4-31b/preemption"
PROCESSES = "gemma4-31b/aborts"

# What the bed finds in the releases as published: case, seed, and words of the finding.
STOCK = {
    # More host blocks than there are: the crash of the report.
    "v0.19.1": ("gemma4-31b/slow", 0, "is not one of 0 to"),
    # Blocks of a sliding layer's chunk in the wrong places: wrong tokens, no error.
    "v0.33.0": ("gemma4-31b/chunks-8", 8, "answers ["),
}


@dataclass(frozen=True)
class KnownFault:
    """One way in which the cases of a variant may fail.

    Attributes:
        case: that fails; others of the same variant may.
        seed: with which it does.
        what: goes wrong.
    """

    case: str
    seed: int
    what: str


# Those of the trees under test; a test asks to take out what is mended.
KNOWN_FAULTS: dict[str, list[KnownFault]] = {
    "v0.19.1": [],
    "v0.33.0": [],
}

# What the tests run, with the seed; the answers to all of it are found out together.
TESTED = {
    *((name, SEED) for name in [*SMOKE, *BITTEN, PROCESSES]),
    *((fault.case, fault.seed) for fault in KNOWN_FAULTS[RELEASE]),
}


def known_fault(name: str) -> str | None:
    """What is known to go wrong in cases like this one."""
    variant = name.partition("/")[2]
    for fault in KNOWN_FAULTS[RELEASE]:
        if variant == fault.case.partition("/")[2]:
            return fault.what
    return None
