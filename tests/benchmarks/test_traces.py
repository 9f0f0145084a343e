"""What is replayed."""

import json
from pathlib import Path

from benchmarks import traces


def tokens(turn: traces.Turn, answer: bool = False) -> list[int]:
    pieces = (*turn.prompt, turn.answer) if answer else turn.prompt
    return list(traces.pieces_tokens(pieces))


def write(path: Path, *lines: tuple[int, int, list[int]]) -> Path:
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 1000 * i,
                    "input_length": length,
                    "output_length": answer,
                    "hash_ids": names,
                }
            )
            + "\n"
            for i, (length, answer, names) in enumerate(lines)
        )
    )
    return path


def test_next_turn_begins_with_all_of_the_one_before(tmp_path: Path) -> None:
    first, second, third = traces.read(
        write(
            tmp_path / "trace",
            (1100, 300, [0, 1, 2]),
            (2000, 10, [0, 1, 3, 4]),
            (2005, 10, [0, 1, 3, 5]),
        )
    )
    assert tokens(second)[:1400] == tokens(first, answer=True)
    assert len(tokens(second)) == 2000
    # One name, one text: also where the third does not follow from the second.
    assert tokens(third)[: 3 * 512] == tokens(second)[: 3 * 512]
    assert tokens(third)[3 * 512] != tokens(second)[3 * 512]


def test_a_shorter_prompt_is_no_next_turn(tmp_path: Path) -> None:
    first, second = traces.read(
        write(tmp_path / "trace", (1100, 300, [0, 1, 2]), (1300, 10, [0, 1, 3]))
    )
    assert tokens(second)[:1024] == tokens(first)[:1024]
    assert tokens(second)[1024] != tokens(first)[1024]


def test_sessions_are_taken_whole(tmp_path: Path) -> None:
    lines = [(1024, 5, [0, 1 + i % 50]) for i in range(200)]
    path = write(tmp_path / "trace", *lines)
    chosen = [
        {turn.prompt[1].text for turn in traces.read(path, part=4, seed=seed)}
        for seed in range(2)
    ]
    assert chosen[0] != chosen[1]
    for seed, sessions in enumerate(chosen):
        assert len(traces.read(path, part=4, seed=seed)) == 4 * len(sessions)


def test_made_up_chats_are_the_same_every_time_and_go_on() -> None:
    turns = traces.make_chats(sessions=5)
    assert turns == traces.make_chats(sessions=5)
    assert turns != traces.make_chats(sessions=5, seed=1)
    longer = max(turns, key=lambda turn: turn.prompt_length)
    assert any(
        tokens(longer)[: len(said)] == said
        for turn in turns
        if turn is not longer
        for said in [tokens(turn, answer=True)]
    )
