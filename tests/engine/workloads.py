"""What is asked of an engine, as data: requests, when they come, and what becomes of them."""

import random
from dataclasses import dataclass, replace

from checkpoints import VOCAB_SIZE

FIRST_TEXT_TOKEN = 4
# Stands in a prompt where a picture is: a token for each of the picture's.
PICTURE_TOKEN = 3
PICTURE_TOKENS = 40
# Long enough that one of the stop strings comes.
STOPPED_ANSWER = 16


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: of the request.
        prompt: its tokens; those of a chat follow `follows` and its answer.
        follows: name of the request whose chat this one continues.
        gap: engine steps between the arrival of the one before and this one's.
        tokens: at most in the answer.
        n: answers, all the same.
        stop: strings that end the answer.
        adapter: whether the model's LoRA adapter answers.
        salt: requests with another one share no blocks with this one.
        picture: number of the one in the prompt.
        reuses: whether it must find some of its prompt in a cache.
        abort_after: engine steps after which the client goes away.
    """

    name: str
    prompt: tuple[int, ...]
    follows: str | None = None
    gap: int = 0
    tokens: int = 8
    n: int = 1
    stop: tuple[str, ...] = ()
    adapter: bool = False
    salt: str | None = None
    picture: int | None = None
    reuses: bool = False
    abort_after: int | None = None


@dataclass(frozen=True)
class Reset:
    """Empty the GPU's prefix cache.

    Attributes:
        gap: engine steps since the last arrival.
        when_idle: wait until nothing is running.
        running: preempt what is running.
        host: empty the host tier, too.
    """

    gap: int = 0
    when_idle: bool = False
    running: bool = False
    host: bool = False


Script = list[Request | Reset]


@dataclass(frozen=True)
class Workload:
    """How a random script is made.

    Attributes:
        requests: how many, before the last round.
        families: prompts of one family share a prefix.
        longest: tokens in a prompt, at most.
        answer: tokens in an answer, at least and at most.
        gap: engine steps between arrivals, at least and at most.
        chats: share of the requests that continue a chat.
        aborts: share that is aborted, at any stage.
        resets: share of the arrivals before which the prefix cache is emptied.
        hard_resets: whether some of that preempts what is running, or empties the host tier.
        doubled: share with two answers.
        stopped: share that ends with a stop string.
        told_apart: kinds of requests of a family, beside the plain one: each has a salt, the
            adapter or a picture of its own ("salt", "adapter", "picture") and the same text.
        last_round: when all is done, empty the prefix cache and ask for each family again;
            if its requests are told apart, for each kind.
        crowd: requests for the longest answer that come first, at once, with one prompt. The
            prompt has room, the answers have none together.
        boundaries: in place of all that, a prompt of each length that matters, and each
            again, with and without one token more, when the prefix cache is empty.
    """

    requests: int = 16
    families: int = 3
    longest: int = 384
    answer: tuple[int, int] = (1, 12)
    gap: tuple[int, int] = (0, 6)
    chats: float = 0.2
    aborts: float = 0.0
    resets: float = 0.0
    hard_resets: bool = False
    doubled: float = 0.1
    stopped: float = 0.1
    told_apart: tuple[str, ...] = ()
    last_round: bool = True
    crowd: int = 0
    boundaries: bool = False

    @property
    def longest_answer(self) -> int:
        return max(self.answer[1], STOPPED_ANSWER)

    def script(self, seed: str, units: tuple[int, ...]) -> Script:
        """A script; many of its lengths lie at a multiple of a unit, or one beside it."""
        if self.boundaries:
            return self._boundaries(seed, units)
        numbers = random.Random(f"script {seed}")
        families = [tokens(f"{seed} {i}", self.longest) for i in range(self.families)]
        script: Script = self._crowd(families[0])
        lengths: dict[str, int] = {}  # of chats that can go on, answer included
        used = dict.fromkeys(range(self.families), 0)
        longest: dict[tuple[int, int], Request] = {}  # of each family and kind
        for i in range(self.requests):
            gap = numbers.randint(*self.gap)
            if numbers.random() < self.resets:
                when_idle = numbers.random() < 0.5
                reset = Reset(gap=gap, when_idle=when_idle)
                if self.hard_resets:
                    host = numbers.random() < 0.3
                    reset = replace(reset, running=not when_idle, host=host)
                script.append(reset)
            request = Request(
                name=f"r{i}", prompt=(), gap=gap, tokens=numbers.randint(*self.answer)
            )
            if lengths and numbers.random() < self.chats:
                before = numbers.choice(sorted(lengths))
                turn = tokens(f"{seed} turn {i}", numbers.randint(1, 48))
                length = lengths.pop(before) + len(turn)
                request = replace(request, follows=before, prompt=turn)
            else:
                family = numbers.randrange(self.families)
                length = self._length(numbers, units)
                shared = min(length, self._length(numbers, units))
                tail = tokens(f"{seed} tail {i}", length - shared)
                request = replace(request, prompt=families[family][:shared] + tail)
                used[family] = max(used[family], shared)
                if self.told_apart:
                    kind = numbers.randint(0, len(self.told_apart))
                    if kind:
                        by = self.told_apart[kind - 1]
                        request = _told_apart(request, by, kind, where=16 * family)
                    longest.setdefault((family, kind), request)
                    if length > len(longest[family, kind].prompt):
                        longest[family, kind] = request
            fate = numbers.random()
            if fate < self.aborts:
                request = replace(request, abort_after=numbers.randint(0, 12))
            elif fate < self.aborts + self.doubled:
                request = replace(request, n=2)
            elif fate < self.aborts + self.doubled + self.stopped:
                request = replace(request, tokens=STOPPED_ANSWER, stop=tuple("etaoinshrdlu"))
            elif length + request.tokens + 48 <= self.longest:
                lengths[request.name] = length + request.tokens
            script.append(request)
        if self.last_round:
            script += _pause("pause")
            for (family, kind), request in longest.items():
                again = replace(request, name=f"last{family}-{kind}", gap=2, n=1, stop=())
                script.append(replace(again, reuses=len(again.prompt) > 2 * max(units)))
            for family, length in used.items() if not longest else ():
                prompt = families[family][:length] or families[family]
                script.append(Request(f"last{family}", prompt, gap=2))
        return script

    def _crowd(self, prompt: tuple[int, ...]) -> Script:
        if not self.crowd:
            return []
        # When the others come, the GPU has the prompt.
        script: Script = [Request("crowd", prompt, tokens=1)]
        for i in range(self.crowd):
            gap = 0 if i else 8
            script.append(Request(f"crowd{i}", prompt, gap=gap, tokens=self.answer[1]))
        return script

    def _boundaries(self, seed: str, units: tuple[int, ...]) -> Script:
        multiples = {unit * n for unit in units for n in (1, 2, 3)}
        lengths = sorted({each + beside for each in multiples for beside in (-1, 0, 1)})
        prompts = [tokens(f"{seed} {n}", n + 1) for n in lengths if n < self.longest]
        script: Script = [Request(f"first{len(p) - 1}", p[:-1]) for p in prompts]
        for name, end in (("again", -1), ("longer", None)):
            script += _pause(f"before-{name}")
            script += [Request(f"{name}{len(p) - 1}", p[:end], tokens=4) for p in prompts]
        return script

    def _length(self, numbers: random.Random, units: tuple[int, ...]) -> int:
        unit = numbers.choice(units)
        if unit > self.longest or numbers.random() < 0.2:
            return numbers.randint(1, self.longest)
        length = unit * numbers.randint(1, self.longest // unit) + numbers.choice((-1, 0, 0, 1))
        return min(length, self.longest)


def _told_apart(request: Request, by: str, number: int, where: int) -> Request:
    """The request with the salt or picture of that number, or with the adapter."""
    match by:
        case "salt":
            return replace(request, salt=f"salt {number}")
        case "adapter":
            return replace(request, adapter=True)
        case "picture":
            if len(request.prompt) <= where + PICTURE_TOKENS:
                return request
            before, behind = request.prompt[:where], request.prompt[where + PICTURE_TOKENS :]
            prompt = (*before, *[PICTURE_TOKEN] * PICTURE_TOKENS, *behind)
            return replace(request, prompt=prompt, picture=number)
    raise ValueError(f"requests are told apart by salt, adapter or picture, not by {by}")


def _pause(name: str) -> Script:
    """Steps in which the copies can end, without a block to store, and an empty cache."""
    idle = Reset(when_idle=True)
    return [idle, Request(name, tokens(name, 1), tokens=24), idle]


def tokens(seed: str | int, length: int) -> tuple[int, ...]:
    """Random text."""
    numbers = random.Random(seed)
    return tuple(numbers.randrange(FIRST_TEXT_TOKEN, VOCAB_SIZE) for _ in range(length))
