"""The figures of the sizing page, against the planner."""

import json
from pathlib import Path

import pytest

from benchmarks import sizing
from scripts.capacity import GIB, VARIANTS, Question, plan
from scripts.plan_capacity import _size

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "sizing.md").read_text()


@pytest.mark.parametrize("variant", VARIANTS)
def test_table(variant):
    planned = plan(Question(model=variant))
    cells = [
        _size(planned.bytes_per_token),
        _size(planned.bytes_per_resume_point),
        _size(planned.bytes_per_session),
        str(100 * GIB // planned.bytes_per_session),
    ]
    assert f"| {variant} | {' | '.join(cells)} |" in PAGE


def test_parallelism():
    one, eight = plan(Question(model="31b")), plan(Question(model="31b", tensor_parallel=8))
    assert eight.bytes_per_token == 2 * one.bytes_per_token
    stages = plan(Question(model="31b", pipeline_parallel=4))
    assert f"need {_size(stages.bytes_per_token)} a token" in PAGE


def test_the_line():
    """That of v0.19.1; v0.33.0 says chunks."""
    logged = plan(Question(model="31b", tensor_parallel=2, offloading_size=120)).log_line
    words = logged.replace("chunks", "blocks").replace(" (1 GPU block(s) each)", "")
    assert words in PAGE


def test_the_picture():
    """What it was drawn from; `python -m benchmarks.sizing` draws it anew."""
    assert json.loads(sizing.FIGURES.read_text()) == sizing.figures()
    drawn = sizing.FIGURES.with_suffix(".svg").read_text()
    assert all(f">{variant}<" in drawn for variant in VARIANTS)
