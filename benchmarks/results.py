"""Results as JSON with what they were measured on, and as tables."""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .workers import ROOT

FOLDER = ROOT / "docs" / "benchmarks"


def circumstances() -> dict[str, Any]:
    """Where, when and how something was measured."""
    # Paths say nothing to others.
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    return {
        "machine": f"{os.cpu_count()} cores of {_cpu_name()}",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def save(name: str, data: dict[str, Any], folder: Path = FOLDER) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def load(name: str, folder: Path = FOLDER) -> list[tuple[str, dict[str, Any]]]:
    """Saved results of that name, and of its variants `name-...`, with their file's stem."""
    paths = sorted([*folder.glob(f"{name}.json"), *folder.glob(f"{name}-*.json")])
    return [(path.stem, json.loads(path.read_text())) for path in paths]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
