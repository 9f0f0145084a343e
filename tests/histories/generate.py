"""Random histories: everything follows from the seed."""

import random
from dataclasses import dataclass, fields
from typing import Any

from .geometry import GEOMETRIES
from .history import Abort, Arrive, History, Operation, Reset, Settings, Steps


@dataclass(frozen=True)
class Mix:
    """What kind of operations a history is made of.

    Attributes:
        length: operations between which the engine runs, about.
        chat: how many of the requests go on with an earlier one.
        repeats: how many have the prompt of an earlier one.
        aborts: how many operations are aborts.
        resets: how many operations are resets.
        floods: how many requests are long and have nothing in common with any other, so
            that they take the GPU's blocks from the rest.
        answers: lengths of answers.
        texts: texts that the prompts begin with.
        stops: how many of the answers end where the model says so.
        images: how many of the texts have an image in them, one of two.
        kinds: how many of the requests have a salt or an adapter.
    """

    length: int
    chat: float
    repeats: float
    aborts: float
    resets: float
    floods: float
    answers: tuple[int, ...]
    texts: int
    stops: float
    images: float
    kinds: float


# One value of each is drawn for a history; what is given to `random_history` takes its
# place.
_CHOICES: dict[str, tuple] = {
    "geometry": tuple(GEOMETRIES),
    # Most histories are of a model with a small window: there as much happens in a
    # hundredth of the time.
    "window_divisor": (1, 4, *(16,) * 22),
    "max_model_len": (1024, 2048, 4096, 4096, 8192),
    "gpu_ratio": (1.0, 1.1, 1.5, 2.0, 4.0),
    "blocks_per_chunk": (1,),
    "budget": (100, 256, 512, 1000, 2048, 8192),
    "max_requests": (1, 3, 8, 8),
    "async_scheduling": (False, True),
    "gpu_lag": (False, True),
    "workers": (1, 1, 1, 1, 2, 3),
    "store_delay": ((0, 0), (0, 3), (1, 8), (5, 20)),
    "load_delay": ((0, 0), (0, 3), (1, 8), (5, 20)),
    "lazy_stores": (False, False, False, True),
    "eviction": ("lru", "lru", "arc"),
    "store_threshold": (0, 0, 0, 2),
    "prompt_only": (False, True),
    # Host tier, in longest requests of which every block is kept.
    "host_ratio": (0.02, 0.3, 1.0, 3.0, 10.0),
    "length": (1, 2, 2, 3, 4, 8, 16),
    "chat": (0.0, 0.3, 0.7),
    "repeats": (0.0, 0.2, 0.5),
    "aborts": (0.0, 0.05, 0.3),
    "resets": (0.0, 0.0, 0.05, 0.2),
    "floods": (0.0, 0.2, 0.4),
    "answers": ((1,), (1, 4), (1, 4, 17), (16, 33, 80)),
    "texts": (1, 2, 4),
    "stops": (0.0, 0.5),
    "images": (0.0, 0.0, 0.5),
    "kinds": (0.0, 0.0, 0.0, 0.3),
}


def random_history(seed: int, given: dict[str, Any] | None = None) -> History:
    """The history of this seed.

    Args:
        seed: any number.
        given: values for settings and for the mix; a list stands for a choice among its
            items. `case` makes another history of the same seed.
    """
    given = dict(given or {})
    rng = random.Random(f"{given.pop('case', '')} {seed}")
    # Draw everything, so that a given value leaves the others as they are.
    values = {name: rng.choice(choices) for name, choices in _CHOICES.items()}
    for name, value in given.items():
        values[name] = rng.choice(value) if isinstance(value, list) else value
    _divide_lengths(values)
    values.setdefault("host_tokens", int(values["max_model_len"] * values["host_ratio"]))
    values["gpu_lag"] &= values["async_scheduling"]
    values["seed"] = seed
    settings = Settings(**_only(Settings, values))
    writer = _Writer(rng, settings, Mix(**_only(Mix, values)))
    for _ in range(writer.mix.length):
        writer.write_one()
    return History(settings, tuple(writer.operations))


def _divide_lengths(values: dict[str, Any]) -> None:
    """Make requests and steps as much smaller as the window, but not of too few chunks."""
    divisor, longest = values["window_divisor"], values["max_model_len"]
    least = max(128, 8 * 16 * values["blocks_per_chunk"])
    values["max_model_len"] = max(longest // divisor, min(longest, least))
    values["budget"] = max(values["budget"] // divisor, 16)


def _only(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


class _Writer:
    def __init__(self, rng: random.Random, settings: Settings, mix: Mix) -> None:
        self.rng = rng
        self.settings = settings
        self.mix = mix
        self.window = settings.model.window or max(1, 512 // settings.window_divisor)
        self.operations: list[Operation] = []
        self.names: list[str] = []
        self.prompts: list[tuple] = []

    def write_one(self) -> None:
        rng, mix = self.rng, self.mix
        roll = rng.random()
        if roll < mix.resets:
            self._add(Reset(running=rng.random() < 0.3, connector=rng.random() < 0.4))
        elif roll < mix.resets + mix.aborts and self.names:
            self._add(Abort(rng.choice(self.names[-6:]), rng.random() < 0.3))
        else:
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                self._arrive()
        if steps := rng.choice((0, 1, 2, 3, 8, 20)):
            self._add(Steps(steps))

    def _arrive(self) -> None:
        rng = self.rng
        name = f"r{len(self.names)}"
        after, images = None, ()
        if rng.random() < self.mix.floods:
            prompt = ((f"flood-{name}", self.settings.max_model_len),)
        elif self.names and rng.random() < self.mix.chat:
            after = rng.choice(self.names[-4:])
            prompt = ((f"turn-{name}", self._at_most_a_quarter(1, 7, 40, 300)),)
        elif self.prompts and rng.random() < self.mix.repeats:
            prompt, images = rng.choice(self.prompts)
        else:
            prompt = ((f"text-{rng.randrange(self.mix.texts)}", self._length()),)
            images = self._images(*prompt[0])
            if images and rng.random() < 0.5:
                # It ends right behind the image.
                end = sum(images[0][1:]) + rng.choice((1, 1, 5))
                prompt = ((prompt[0][0], min(end, prompt[0][1])),)
            elif rng.random() < 0.6:
                prompt += ((f"tail-{name}", self._at_most_a_quarter(1, 5, 16, 90, 700)),)
            self.prompts.append((prompt, images))
        self.names.append(name)
        answer = min(rng.choice(self.mix.answers), self.settings.max_model_len // 2)
        salt = adapter = None
        if rng.random() < self.mix.kinds:
            salt, adapter = rng.choice((("s1", None), ("s2", None), (None, "a"), ("s1", "a")))
        stops = rng.random() < self.mix.stops
        self._add(Arrive(name, prompt, answer, after, stops, images, salt, adapter))

    def _images(self, name: str, length: int) -> tuple[tuple[str, int, int], ...]:
        """An image at a place and of a size that belong to the text, one of two."""
        image = f"{name}-{self.rng.randrange(2)}"
        place = random.Random(f"{self.settings.seed} {name}")
        if place.random() >= self.mix.images:
            return ()
        size = min(place.choice((1, 16, 40, 100, 280)), self.settings.budget)
        start = place.randrange(max(1, self.settings.max_model_len // 2))
        return ((image, start, size),) if start + size <= length else ()

    def _at_most_a_quarter(self, *lengths: int) -> int:
        """One of the lengths, cut to a quarter of the longest request."""
        return min(self.rng.choice(lengths), self.settings.max_model_len // 4)

    def _length(self) -> int:
        """Often one token off a boundary: of a block, a chunk, or the window."""
        rng, settings = self.rng, self.settings
        longest = settings.max_model_len
        unit = rng.choice((16, 32, 64, 16 * settings.blocks_per_chunk, self.window))
        length = rng.randrange(1, max(2, longest // unit + 1)) * unit
        if rng.random() < 0.3:
            length = rng.randrange(1, longest)
        return max(1, min(longest, length + rng.choice((-1, 0, 0, 1))))

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)
