"""A real Prometheus: the one on PATH, or Debian's package, unpacked and not installed."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

_PATIENCE = 30


def find() -> Path | None:
    """The program, or None where it cannot be had."""
    if installed := shutil.which("prometheus"):
        return Path(installed)
    cache = Path(os.environ.get("GEMMA4KV_CACHE", "~/.cache/gemma4kv")).expanduser()
    folder = cache / "prometheus"
    program = folder / "usr" / "bin" / "prometheus"
    if program.is_file():
        return program
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, capture_output=True)
    for package in folder.glob("prometheus_*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        package.unlink()
        return program
    return None


class Prometheus:
    """Scrapes one address every second, until the end of the `with` block."""

    def __init__(self, program: Path, target: str, folder: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        config = folder / "prometheus.yml"
        config.write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "1s"},
                    "scrape_configs": [
                        {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
                    ],
                }
            )
        )
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "log").open("wb"),
        )
        self._log = folder / "log"

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE)

    def query(self, expression: str) -> list[dict]:
        """The series that answer a query, as soon as there are any; else none."""
        end = time.monotonic() + _PATIENCE
        while not (found := self._ask(expression)) and time.monotonic() < end:
            time.sleep(0.2)
        return found

    def _ask(self, expression: str) -> list[dict]:
        address = f"http://127.0.0.1:{self._port}/api/v1/query?"
        request = address + urllib.parse.urlencode({"query": expression})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code != 503:  # not ready yet
                raise AssertionError(f"{expression}: {error.read().decode()}") from error
        except OSError as error:
            if self._process.poll() is not None:
                raise AssertionError(self._log.read_text()) from error
        return []
