"""`make test`: everything that the project promises, without a GPU."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from scripts import checkout, environment, series, wheel
from scripts.pins import ROOT, Pin
from scripts.shell import Failure, run, say

_TESTS = ROOT / "tests"


def test(pins: list[Pin]) -> None:
    """Run all tests, the fast ones first.

    Raises:
        Failure: at the first group of tests that does not pass.
    """
    run_pytest("the project's machinery", sys.executable, _TESTS / "machinery")
    pythons = {}
    for pin in pins:
        checkout.apply(pin)
        built = wheel.build(pin, "cpu", wheel.host_arch())
        pythons[pin.tag] = environment.ensure(pin, built)
    for pin in pins:
        test_upstream(pin, pythons[pin.tag])
    for pin in pins:
        run_pytest(f"{pin.tag}: the engine", pythons[pin.tag], _TESTS / "engine")
