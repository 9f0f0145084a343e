"""How much host memory a Gemma 4 server needs for KV offloading, and what it holds.

    python -m scripts.plan_capacity MODEL [--tp N] [--context TOKENS] [--sessions N] ...

MODEL is a `config.json`, a folder with one, or a variant such as `31b`. Runs in the test
environment of a pin, or in any Python that has a patched vLLM; no GPU is needed.
"""

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.capacity import GIB, VARIANTS, Plan, Question, plan
from scripts.shell import Failure

ROOT = Path(__file__).resolve().parent.parent
_PINS = ("v0.19.1", "v0.33.0")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    pin, as_json = arguments.__dict__.pop("pin"), arguments.__dict__.pop("json")
    try:
        if pin or importlib.util.find_spec("vllm") is None:
            return _run_in_environment(pin or _PINS[0], sys.argv[1:] if argv is None else argv)
        _quieten()
        answer = plan(Question(**vars(arguments)))
        print(json.dumps(dataclasses.asdict(answer), indent=2) if as_json else report(answer))
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report(plan: Plan) -> str:
    """The plan in words."""
    asked = plan.question
    groups = "\n".join(
        f"  {count} x {group.layers} layers, "
        + (f"window of {group.window:,} tokens" if group.window else "full attention")
        + f": blocks of {group.block_tokens} tokens, {group.chunks:,} chunks a session"
        for group, count in Counter(plan.groups).items()
    )
    model = shlex.quote(asked.model) if Path(asked.model).exists() else "MODEL"
    shared_memory = (
        f"{_size(plan.shared_memory)} or more; the pool lives there, and counts as memory too"
        if plan.shared_memory
        else "nothing for the pool"
    )
    return f"""\
{asked.model} on vLLM {plan.release}, TP {asked.tensor_parallel}, \
PP {asked.pipeline_parallel}, KV cache of type {asked.kv_dtype}

KV cache groups, each with chunks of its own in host memory:
{groups}

A chunk takes            {_size(plan.chunk_bytes)}
A token takes            {_size(plan.bytes_per_token)} in the layers with full attention
A place to resume takes  {_size(plan.bytes_per_resume_point)} in those with a sliding window
A session takes          {_size(plan.bytes_per_session)}: {asked.context:,} tokens, \
{asked.resume_points} place(s) to resume
A GiB holds              {GIB * asked.context // plan.bytes_per_session:,} tokens, \
{GIB / plan.bytes_per_session:.3g} sessions

--kv-offloading-size {plan.offloading_gib:g} holds {plan.sessions:,} sessions. \
The engine will log:
  {plan.log_line}

{"Each" if asked.nodes > 1 else "The"} container needs
  memory limit   {_size(plan.memory_limit)} or more: the pool, {asked.process_gib} GiB for \
each process (assumed), and what vLLM keeps free
  /dev/shm       {shared_memory}
  locked memory  as much as the pool: CUDA pins it; vLLM itself locks nothing

vllm serve {model} {shlex.join(plan.arguments)}"""


def _size(value: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.0f} bytes"


def _run_in_environment(pin: str, arguments: Sequence[str]) -> int:
    """Do it with the test environment of a pin."""
    python = ROOT / "build" / "env" / pin / "bin" / "python"
    if not python.is_file():
        raise Failure(
            f"{python} is missing: `make test PIN={pin}` makes the environment. Or run "
            "this with a Python that has a patched vLLM."
        )
    # The last one counts: none, which is the vLLM of that Python.
    command = [python, "-m", "scripts.plan_capacity", *arguments, "--pin", ""]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


def _quieten() -> None:
    """Only the answer is of interest."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.plan_capacity", description=__doc__.partition("\n")[0]
    )

    defaults = {field.name: field.default for field in dataclasses.fields(Question)}

    def add(name: str, text: str, **options: Any) -> None:
        dest = options.get("dest", name.strip("-").replace("-", "_"))
        default = defaults[dest]
        note = "" if default is None else f" (default: {default})"
        parser.add_argument(name, help=text + note, default=default, **options)

    parser.add_argument("model", help=f"config.json, its folder, or {', '.join(VARIANTS)}")
    add("--tp", "tensor parallel size", type=_positive, dest="tensor_parallel", metavar="N")
    add("--pp", "pipeline parallel size", type=_positive, dest="pipeline_parallel", metavar="N")
    add("--nodes", "machines that the workers are spread over", type=_positive, metavar="N")
    add("--kv-dtype", "as vLLM's --kv-cache-dtype", metavar="TYPE")
    add("--dtype", "of the model, for a KV cache of type auto", metavar="TYPE")
    add("--block-size", "tokens in a GPU block", type=_positive, metavar="TOKENS")
    add("--blocks-per-chunk", "GPU blocks in a host chunk", type=_positive, metavar="N")
    add("--context", "tokens of a session: max_model_len", type=_positive, metavar="TOKENS")
    add("--sessions", "sessions to keep", type=_positive, metavar="N")
    add("--resume-points", "windows to keep for each", type=_positive, metavar="N")
    add("--offloading-size", "GiB to plan with, in place of --sessions", type=float,
        metavar="GIB")  # fmt: skip
    add("--process-gib", "GiB of host memory that each process takes besides the pool",
        type=_positive, metavar="GIB")  # fmt: skip
    parser.add_argument(
        "--pin", choices=[*_PINS, ""], metavar="PIN", help="plan in this pin's test environment"
    )
    parser.add_argument("--json", action="store_true", help="print the plan for machines")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
