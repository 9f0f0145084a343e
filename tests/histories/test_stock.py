"""What other processes find; these tests come last and the processes start first."""

import re
from collections.abc import Callable

from . import pins
from .cases import history
from .planted import Caught
from .world import replay

_FINDINGS = {
    "v0.19.1": r"breaks I4: .* uses host block \d+, which lies outside the pool",
    "v0.33.0": r"breaks (I6: .* into slot \d+ of its host chunk|I1: .* reads host block)",
}


def test_bed_bites_on_the_release_as_published(
    in_stock: Callable[[], str], caught: Caught
) -> None:
    output = in_stock()
    assert re.search(_FINDINGS[pins.current().TAG], output), output
    seed, finding = re.search(r"seed (\d+), breaks (.*)", output).groups()
    (seconds,) = re.search(r"steps in (\d+) s", output).groups()
    caught(int(seed), f"after {seconds} s of its own: {finding}")


def test_a_seed_is_the_same_history_in_every_process(
    trace_elsewhere: Callable[[], str],
) -> None:
    """Python's hash seed, which orders sets, must not matter."""
    expected = replay(history("slow-copies", "gemma4-e2b", 3)).trace
    output = trace_elsewhere()
    assert f"trace {expected}" in output, output
