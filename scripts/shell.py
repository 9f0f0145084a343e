"""Run programs, and say plainly what went wrong."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class Failure(Exception):
    """Something the user should know about; the message says what to do next."""


def say(text: str) -> None:
    print(text, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    check: bool = True,
    capture: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `command` without a shell.

    Args:
        command: program and arguments.
        cwd: working directory.
        env: variables added to this process's environment, or with None taken out.
        check: turn a non-zero exit status into a `Failure`.
        capture: return the output instead of showing it.
        timeout: seconds after which the program is ended.

    Raises:
        Failure: the program is missing, took too long, or (with `check`) failed.
    """
    argv = [str(part) for part in command]
    merged = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env={name: value for name, value in merged.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.PIPE if capture else None,
            text=True,
            errors="surrogateescape",
            timeout=timeout,
        )
    except FileNotFoundError:
        raise Failure(f"{argv[0]} is not installed or not on PATH") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"no answer in {timeout:.0f} s: {shlex.join(argv)}") from None
    if check and done.returncode:
        output = f":\n{everything(done)}" if capture else ""
        raise Failure(f"exit status {done.returncode}: {shlex.join(argv)}{output}")
    return done


def everything(done: subprocess.CompletedProcess[str]) -> str:
    """What a program printed, warnings included, for people to read."""
    return f"{done.stdout}\n{done.stderr}".strip()
