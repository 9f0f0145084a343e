"""Check Grafana dashboards: every field is one that Grafana knows, every query is PromQL.

    python check_dashboard.py FILE...

Needs grafana-foundation-sdk and promql-parser; tests/machinery/test_deploy.py runs it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def problems(dashboard: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a dashboard."""
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    yield from _lost(dashboard, known, "dashboard")
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            try:
                promql_parser.parse(query)
            except ValueError as error:
                yield f"{panel['title']}: {query}: {error}"


def _lost(before: Any, after: Any, where: str) -> Iterator[str]:
    """What Grafana's own types do not keep."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from _lost(value, after[key], f"{where}.{key}")
            else:
                yield f"{where}: Grafana knows no {key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after)):
            yield from _lost(*pair, f"{where}[{number}]")
    elif before != after:
        yield f"{where}: Grafana reads {after!r}, not {before!r}"


def main(files: list[str]) -> int:
    found = [
        f"{file}: {problem}"
        for file in files
        for problem in problems(json.loads(Path(file).read_text()))
    ]
    print("\n".join(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
