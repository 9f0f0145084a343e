"""The live check's verdicts on real servers, one after the other, on this machine's CPU.

    build/env/v0.19.1/bin/python -m tests.server [CASE...]

Each takes a minute; `make test` has one of them, in an image (`tests/image`).
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "engine"))
import environment  # noqa: E402  (sets up vLLM)
from checkpoints import write  # noqa: E402
from engines import Server, offloading  # noqa: E402

from tests.histories.stock import stock_path  # noqa: E402

ENOUGH, TOO_LITTLE = 96 << 20, 3 << 20
UNKNOWN_KEY = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": ENOUGH, "num_cpu_blocks": 1000},
}


def backend(size: int, name: str = "TimedSpec") -> dict:
    settings = offloading(size)
    settings["kv_connector_extra_config"] |= {
        "spec_name": name, "spec_module_path": "timed_memory_spec",
    }  # fmt: skip
    return settings


# settings, options of the check, verdict
CASES: dict[str, tuple[dict, list[str], str]] = {
    "patched": (backend(ENOUGH), [], "works"),
    "off": (backend(ENOUGH), [], "off"),
    "memory-too-small": (backend(TOO_LITTLE), [], "too-small"),
    "wrong-key": (UNKNOWN_KEY, [], "no-server"),
    "dies-half-way": (backend(ENOUGH, "DiesOnLoadSpec"), [], "died"),
    "stock": (backend(ENOUGH), [], "unpatched"),
    "stock-under-load": (backend(ENOUGH), ["--load-unpatched"], "died"),
    "not-vllm": ({}, [], "no-server"),
    "two-nodes": (backend(ENOUGH), [], "works"),
    "two-nodes-pipeline": (backend(ENOUGH), [], "works"),
}
# Each node is a `vllm serve`, as in deploy/multi-node.sh.
NODES: dict[str, dict[str, Any]] = {
    "two-nodes": {"tensor_parallel_size": 2},
    "two-nodes-pipeline": {"pipeline_parallel_size": 2},
}
# What the CPU of a release cannot do, with a connector or without.
UNABLE = {("v0.33.0", "two-nodes-pipeline"): "its CPU worker cannot run pipeline stages"}


class Addressed(Server):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


@contextmanager
def started(name: str, model: Path, log: Path) -> Iterator[str]:
    """The address of a server, or where one would have been."""
    if name == "not-vllm":
        port = str(free_port())
        command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=log.parent, **quiet) as process:
            yield f"http://127.0.0.1:{port}"
            process.terminate()
        return
    settings: dict[str, Any] = {"num_gpu_blocks_override": 200, "served_model_name": "gemma"}
    if name == "off":
        settings["kv_transfer_config"] = "None"  # the last of an option counts
    kv_transfer = CASES[name][0]
    with ExitStack() as stack:
        if name in NODES:
            settings |= NODES[name] | {
                "nnodes": 2, "distributed_executor_backend": "mp",
                "master_addr": "127.0.0.1", "master_port": free_port(),
            }  # fmt: skip
            other = log.with_name("log-of-the-other-node")
            settings_of_other = settings | {"node_rank": 1, "headless": True}
            stack.callback(
                Server(model, other, kv_transfer=kv_transfer, **settings_of_other).stop
            )
        server = Addressed(model, log, kv_transfer=kv_transfer, **settings)
        with suppress(AssertionError):  # the check is to say why
            stack.enter_context(server)
        yield server.url


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def release_as_published(folder: Path) -> Iterator[None]:
    path = stock_path(environment.RELEASE, folder)
    version = path / "vllm" / "_version.py"
    text = version.read_text()
    version.unlink()
    version.write_text(re.sub(r"[+.]gemma4kv\.\d+", "", text))
    before = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(path), before])
    yield
    os.environ["PYTHONPATH"] = before


def check(name: str, model: Path, folder: Path) -> bool:
    log = folder / "log"
    log.touch()
    _, options, wanted = CASES[name]
    with started(name, model, log) as url:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.verify_server", "--json", "--quiet",
             "--patience=60", "--url", url, "--log", log, *options],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
    report = json.loads(done.stdout)
    right = report["verdict"] == wanted
    print(f"\n{name}: {report['verdict']}{'' if right else f', expected {wanted}'}")
    print("\n".join(f"    {line}" for line in report["text"]), flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server", description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    right = []
    with tempfile.TemporaryDirectory(prefix="gemma4kv-") as scratch:
        model = write("gemma4-31b", Path(scratch) / "model")
        for name in parser.parse_args().cases or CASES:
            if reason := UNABLE.get((environment.RELEASE, name)):
                print(f"\n{name}: left out, {reason}")
                continue
            folder = Path(scratch) / name
            folder.mkdir()
            if name.startswith("stock"):
                with release_as_published(folder):
                    right.append(check(name, model, folder))
            else:
                right.append(check(name, model, folder))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
