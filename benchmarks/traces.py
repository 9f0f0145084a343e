"""Requests to replay: from a trace file, or made up.

A trace file is one of Mooncake's: a line names the prompt's blocks of 512 tokens, equal
names for equal tokens after equal prefixes. The last block of a prompt is mostly not full,
and so never has the name that the same block has in the next turn, where the answer
follows. The next turn of a chat begins with all of its predecessor: where a prompt goes on
after all full blocks of an earlier one, and is long enough for that one's answer, it is
taken to contain the rest and the answer, too. Answers are made up.
"""

import collections
import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 512
# A block that so many requests begin with says nothing about whose session it is.
_COMMON = 0.02


@dataclass(frozen=True)
class Turn:
    """A request: when it arrives, in seconds, and what it says."""

    arrival: float
    prompt: tuple["Piece", ...]
    answer: "Piece"

    @property
    def prompt_length(self) -> int:
        return sum(piece.length for piece in self.prompt)


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `start + length` of the text with this number."""

    text: int
    start: int
    length: int

    def tokens(self) -> range:
        # Two texts have no token in common.
        first = (self.text << 20) + self.start
        return range(first, first + self.length)


def read(path: Path, part: int = 1, seed: int = 0) -> list[Turn]:
    """The requests of one in `part` sessions of a trace file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seen = collections.Counter(name for line in lines for name in set(line["hash_ids"]))
    most = _COMMON * len(lines)

    def chosen(line: dict) -> bool:
        names = line["hash_ids"]
        session = next((name for name in names if seen[name] <= most), names[0])
        return zlib.crc32(f"{seed} {session}".encode()) % part == 0

    turns: list[Turn] = []
    # By full blocks: the last request with exactly these.
    earlier: dict[tuple[int, ...], Turn] = {}
    contents: dict[int, tuple[Piece, ...]] = {}
    lines = [line for line in lines if chosen(line)]
    for line in lines:
        names, length = line["hash_ids"], line["input_length"]
        parent = next(
            (
                earlier[key]
                for n in range(len(names), 1, -1)
                if (key := tuple(names[:n])) in earlier
            ),
            None,
        )
        if parent is not None:
            _continue(contents, names, length, parent)
        prompt = []
        for i, name in enumerate(names):
            size = min(_BLOCK, length - i * _BLOCK)
            prompt += _cut(contents.get(name, (Piece(name + 1, 0, _BLOCK),)), 0, size)
        answer = Piece((1 << 24) + len(turns), 0, max(1, line["output_length"]))
        turn = Turn(line["timestamp"] / 1000, tuple(prompt), answer)
        turns.append(turn)
        if length >= 2 * _BLOCK:
            earlier[tuple(names[: length // _BLOCK])] = turn
    return turns


def _continue(
    contents: dict[int, tuple[Piece, ...]], names: Sequence[int], length: int, parent: Turn
) -> None:
    """Fill the blocks after the parent's full ones with its end and its answer."""
    said = [*parent.prompt, parent.answer]
    total = parent.prompt_length + parent.answer.length
    if length < total:
        return
    for i in range(parent.prompt_length // _BLOCK, min(len(names), -(-total // _BLOCK))):
        start, end = i * _BLOCK, min((i + 1) * _BLOCK, total)
        mine = Piece(names[i] + 1, 0, _BLOCK)
        rest = _cut((mine,), end - start, _BLOCK)
        contents.setdefault(names[i], (*_cut(said, start, end), *rest))


def _cut(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """The tokens `start` to `end` of pieces that follow each other."""
    result, position = [], 0
    for piece in pieces:
        low, high = max(start - position, 0), min(end - position, piece.length)
        if low < high:
            result.append(Piece(piece.text, piece.start + low, high - low))
        position += piece.length
    return result


def make_chats(sessions: int = 60, minutes: float = 60, seed: int = 0) -> list[Turn]:
    """Chats of people who read what they get before they answer.

    Half of them begin with one of four system prompts, some with a long document that other
    chats are about, too. Lengths are spread as in public traces: many short turns, few
    long ones.
    """
    rng = random.Random(seed)
    names = iter(range(1, 1 << 24))
    systems = [Piece(next(names), 0, rng.choice((400, 1500, 3000, 6000))) for _ in range(4)]
    documents = [Piece(next(names), 0, rng.randrange(8000, 40000)) for _ in range(12)]
    turns: list[Turn] = []
    for _ in range(sessions):
        now = rng.uniform(0, minutes * 60)
        said: list[Piece] = []
        if rng.random() < 0.5:
            said.append(rng.choice(systems))
        if rng.random() < 0.25:
            said.append(rng.choice(documents))
        for _ in range(1 + min(20, int(rng.expovariate(0.25)))):
            said.append(Piece(next(names), 0, _length(rng, 400, 12000)))
            answer = Piece(next(names), 0, _length(rng, 250, 2000))
            turns.append(Turn(now, tuple(said), answer))
            said.append(answer)
            now += answer.length * 0.03 + 10 + rng.expovariate(1 / 90)
    return sorted(turns, key=lambda turn: turn.arrival)


def _length(rng: random.Random, middle: int, longest: int) -> int:
    return max(8, min(longest, int(rng.lognormvariate(0, 1.2) * middle)))


def pieces_tokens(pieces: Sequence[Piece]) -> Iterator[int]:
    for piece in pieces:
        yield from piece.tokens()
