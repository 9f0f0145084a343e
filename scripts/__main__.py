"""`python -m scripts COMMAND`; the Makefile is the front that people use."""

import argparse
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from scripts import checkout, pins
from scripts.shell import Failure, say


def main() -> int:
    arguments = _parser().parse_args()
    chosen = [arguments.pin] if arguments.pin else arguments.default_pins()
    lock = pins.ROOT / "build" / ".lock"
    try:
        if arguments.command is where:
            return _each(arguments, chosen)
        lock.parent.mkdir(exist_ok=True)
        with FileLock(lock, timeout=0):
            return _each(arguments, chosen)
    except Timeout:
        say("error: another make command is at work in this folder; wait for it to end")
    except Failure as error:
        say(f"error: {error}")
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nobody is left to tell
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = ": free some and run again" if full else ""
        say(f"error: {error.strerror or error}: {error.filename or 'a file'}{advice}")
    except KeyboardInterrupt:
        say("error: interrupted; run the command again to go on")
        return 130
    return 1


def _each(arguments: argparse.Namespace, tags: list[str]) -> int:
    arguments.command([pins.load(tag) for tag in tags], arguments)
    return 0


def apply(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    for pin in chosen:
        checkout.apply(pin, resolve=arguments.resolve)


def export(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    for pin in chosen:
        checkout.export(pin)


def check(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import checks

    checks.check(chosen)


def bisect(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts.bisection import bisect

    for pin in chosen:
        bisect(pin)


def build(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import wheel

    for pin in chosen:
        if arguments.source:
            wheel.build_from_source(pin, arguments.variant, arguments.source_python)
        else:
            wheel.build(pin, arguments.variant, arguments.arch or wheel.host_arch())


def test(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import testing

    testing.test(chosen)


def prepare(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import environment, wheel

    for pin in chosen:
        checkout.apply(pin)
        environment.ensure(pin, wheel.build(pin, "cpu", wheel.host_arch()))


def where(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import wheel

    for pin in chosen:
        arch = arguments.arch or wheel.host_arch()
        say(f"checkout={pin.checkout}")
        say(f"python={pin.environment / 'bin' / 'python'}")
        say(f"wheel={wheel.wheel_path(pin, arguments.variant, arch)}")


def installer(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import installer, wheel

    for pin in chosen:
        installer.build(pin, wheel.build(pin, "cuda", arguments.arch or wheel.host_arch()))


def image(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts import image

    for pin in chosen:
        image.build(
            pin,
            arguments.base,
            name=arguments.name,
            engine=image.find_engine(arguments.engine),
            arch=arguments.arch,
            options=tuple(arguments.option),
        )


def drift(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts.drift import drift

    for pin in chosen:
        drift(pin, arguments.source)


def submit(chosen: list[pins.Pin], arguments: argparse.Namespace) -> None:
    from scripts.submit import submit

    for pin in chosen:
        submit(arguments.fix, pin)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def add(
        command: Callable, text: str, *, every_pin: bool = False, default: str = pins.DEFAULT
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(command.__name__, help=text)
        sub.add_argument("--pin", help="default: " + ("all" if every_pin else default))
        sub.set_defaults(
            command=command,
            default_pins=pins.tags if every_pin else lambda: [default],
        )
        return sub

    sub = add(apply, "check out the pinned vLLM and apply the series")
    sub.add_argument("--resolve", action="store_true", help="stop at a conflict to resolve it")
    add(export, "write the checkout's commits to patches/")
    add(check, "prove the round trip and lint series and project", every_pin=True)
    add(bisect, "test the tree after every single patch")
    for command, text in (
        (build, "make the wheel"),
        (where, "print checkout=, python= and wheel="),
    ):
        sub = add(command, text)
        sub.add_argument("--variant", choices=["cuda", "cpu"], default="cuda")
        sub.add_argument("--arch", choices=["x86_64", "aarch64"], default=None)
        if command is build:
            sub.add_argument("--source", action="store_true", help="run vLLM's own build")
            sub.add_argument(
                "--source-python", default=os.environ.get("SOURCE_PYTHON", "python3")
            )
    sub = add(installer, "make a file that puts the series into an installed vLLM")
    sub.add_argument("--arch", choices=["x86_64", "aarch64"])
    sub = add(image, "build an image with the series, one layer on an official one")
    sub.add_argument("--arch", choices=["x86_64", "aarch64"])
    sub.add_argument("--base", help="image to build on, best with its digest")
    sub.add_argument("--name", help="of the new image")
    sub.add_argument("--engine", help="docker, podman or buildah; default: what works")
    sub.add_argument("--option", action="append", default=[], help="for the engine")
    add(test, "run everything that the project promises", every_pin=True)
    add(prepare, "make the test environments", every_pin=True)
    sub = add(drift, "try the series on a newer source", default=pins.newest())
    sub.add_argument("--source", type=Path, required=True, help="a folder, clone or sdist")
    sub = add(submit, "print a fix's pull requests, checked", default=pins.newest())
    sub.add_argument("--fix", required=True, help="an id in upstream/fixes.toml")
    return parser


if __name__ == "__main__":
    sys.exit(main())
