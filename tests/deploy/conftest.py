"""What the real engine says is asked with the bed's checkpoints and settings."""

import sys
from pathlib import Path

import pytest

_ENGINE = Path(__file__).parents[1] / "engine"
sys.path[:0] = [str(_ENGINE), str(_ENGINE.parents[1])]

import environment  # noqa: E402, F401  # sets up vLLM for every process


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A function that writes a small checkpoint, once, and returns its folder."""
    import checkpoints

    return checkpoints.writer(tmp_path_factory.mktemp("checkpoints"))
