"""A history: the settings of an engine and what happens to it, as plain data.

A history replays exactly: nothing in it depends on time, on the machine, or on Python's
hash seed. It is written as JSON, one line per operation.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from .geometry import GEOMETRIES, Geometry


@dataclass(frozen=True)
class Settings:
    """The engine and the copies under test.

    Attributes:
        geometry: name in `geometry.GEOMETRIES`.
        window_divisor: how much smaller the model's window is than in truth.
        max_model_len: longest request, in tokens.
        gpu_ratio: GPU pool, in multiples of what the longest request needs.
        host_tokens: host tier, in tokens of which every block is kept.
        blocks_per_chunk: GPU blocks in one host chunk.
        budget: tokens computed in one step.
        max_requests: requests in one step.
        hybrid: None leaves the hybrid KV cache manager to vLLM's own decision.
        prefix_caching: whether the GPU keeps blocks for later requests.
        async_scheduling: schedule a step before the output of the last one is known.
        gpu_lag: with asynchronous scheduling, the GPU runs one step behind the worker.
        runner: model runner whose order of connector calls is followed, `v1` or `v2`.
        workers: tensor-parallel workers, or pipeline stages with `stages`.
        stages: whether the workers hold different layers.
        store_delay: fewest and most steps that a store takes.
        load_delay: fewest and most steps that a load takes.
        lazy_stores: stores finish only when somebody waits for them, nothing else moves, or
            so many steps later that no hardware is as slow.
        fail_every: every so many-th copy fails; 0 for never.
        eviction: policy of the host tier.
        store_threshold: how often a block must be seen before it is stored.
        prompt_only: do not store what was generated.
        retention: `default`, `all`, or tokens between checkpoints of sliding layers.
        bidirectional: whether the tokens of an image look at those behind them.
        sync_load_bytes: loads up to this size are waited for within the step.
        seed: of the copies' delays.
    """

    geometry: str = "qwen3-32b"
    window_divisor: int = 1
    max_model_len: int = 4096
    gpu_ratio: float = 2.0
    host_tokens: int = 16384
    blocks_per_chunk: int = 1
    budget: int = 512
    max_requests: int = 8
    hybrid: bool | None = None
    prefix_caching: bool = True
    async_scheduling: bool = False
    gpu_lag: bool = False
    runner: str = "v1"
    workers: int = 1
    stages: bool = False
    store_delay: tuple[int, int] = (0, 0)
    load_delay: tuple[int, int] = (0, 0)
    lazy_stores: bool = False
    fail_every: int = 0
    eviction: str = "lru"
    store_threshold: int = 0
    prompt_only: bool = False
    retention: str | int = "default"
    bidirectional: bool = False
    sync_load_bytes: int = 0
    seed: int = 0

    @property
    def model(self) -> Geometry:
        """The KV cache shapes of the model."""
        return GEOMETRIES[self.geometry].with_window_divided(self.window_divisor)

    @property
    def batches(self) -> int:
        """Steps that the engine has under way at once."""
        if self.async_scheduling:
            return 2
        return self.workers if self.stages else 1


@dataclass(frozen=True)
class Arrive:
    """A request arrives.

    Attributes:
        name: of the request.
        prompt: texts and how many of their first tokens, one after the other.
        generate: tokens to generate.
        stops: whether the model ends the answer there by itself.
        after: name of an earlier request whose tokens so far come first, as in a chat.
        images: of each its name, where in this prompt it begins, and how many tokens stand
            for it; they are the same for every image.
        salt: only requests with the same one may share KV.
        adapter: name of the LoRA adapter.
    """

    name: str
    prompt: tuple[tuple[str, int], ...]
    generate: int
    after: str | None = None
    stops: bool = False
    images: tuple[tuple[str, int, int], ...] = ()
    salt: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Abort:
    """The user of a request goes away.

    Attributes:
        name: of the request.
        during_step: while the model runs, not between two steps.
    """

    name: str
    during_step: bool = False


@dataclass(frozen=True)
class Reset:
    """The prefix cache is emptied.

    Attributes:
        running: preempt the running requests to do so.
        connector: empty the host tier as well.
    """

    running: bool = False
    connector: bool = False


@dataclass(frozen=True)
class Steps:
    """The engine makes steps."""

    count: int


Operation = Arrive | Abort | Reset | Steps
_OPERATIONS = {cls.__name__.lower(): cls for cls in (Arrive, Abort, Reset, Steps)}


@dataclass(frozen=True)
class History:
    """Settings and operations; the engine then runs until nothing is left to do."""

    settings: Settings
    operations: tuple[Operation, ...] = field(default=())

    def to_json(self) -> str:
        settings = {
            name: value
            for name, value in dataclasses.asdict(self.settings).items()
            if value != getattr(Settings, name)
        }
        lines = ",\n    ".join(
            json.dumps({type(operation).__name__.lower(): _changed(operation)})
            for operation in self.operations
        )
        return (
            f'{{\n  "settings": {json.dumps(settings)},\n'
            f'  "operations": [\n    {lines}\n  ]\n}}\n'
        )

    @staticmethod
    def from_json(text: str) -> "History":
        raw = json.loads(text)
        return History(
            Settings(**{name: _frozen(v) for name, v in raw["settings"].items()}),
            tuple(
                _OPERATIONS[kind](**{name: _frozen(v) for name, v in fields.items()})
                for operation in raw["operations"]
                for kind, fields in operation.items()
            ),
        )

    @staticmethod
    def load(path: Path) -> "History":
        return History.from_json(path.read_text())


def _changed(operation: Operation) -> dict:
    """The fields of an operation without those left at their default."""
    return {
        f.name: value
        for f in dataclasses.fields(operation)
        if (value := getattr(operation, f.name)) != f.default
    }


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
