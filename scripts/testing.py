"""`make test`: everything that the project promises, without a GPU."""

import sys
from pathlib import Path

from scripts import checkout, environment, wheel
from scripts.pins import ROOT, Pin
from scripts.shell import run, say

_TESTS = ROOT / "tests"
