"""`make bisect`: after every single patch the tree imports, is lint clean and tested.

A patch's own tests are the test files that it touches. They run against the tree before
the patch, where at least one must fail, and against the tree after it, where none may.
"""

import os
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from scripts import checkout, environment, series, testing, wheel
from scripts.git import Git
from scripts.pins import Pin
from scripts.shell import Failure, everything, run, say
from scripts.upstream_lint import lint


@dataclass(frozen=True)
class Outcome:
    """Ids of tests by result; a module that cannot be imported is one failed test."""

    passed: frozenset[str]
    failed: frozenset[str]
    output: str


def bisect(pin: Pin) -> None:
    """Raises `Failure` at the first patch that does not keep its promises."""
    python = environment.ensure(pin, wheel.build(pin, "cpu", wheel.host_arch()))
    repository = checkout.require_series(pin)
    commits = repository("rev-list", "--reverse", f"{checkout.BASE}..HEAD").split()
    with checkout.scratch_worktree(repository, checkout.BASE) as tree:
        borrow_compiled_code(python, pin, tree)
        for commit, (name, content) in zip(commits, series.read(pin.series).items()):
            check_patch(pin, python, tree, commit, name, series.touched(content))


def check_patch(
    pin: Pin,
    python: Path,
    tree: Git,
    commit: str,
    name: str,
    files: list[series.TouchedFile],
) -> None:
    """Check one patch; `tree` stands at the commit before it and ends at the commit."""
    present = [file.path for file in files if file.after]
    tests = [path for path in present if testing.is_test(path)]
    modules = [path for path in present if path.startswith("vllm/") and path.endswith(".py")]
    before = None
    if tests:
        # The new tests on the old code.
        tree(
            "checkout", "--quiet", commit, "--", *[p for p in present if p.startswith("tests/")]
        )
        before = run_tests(pin, python, tree, tests)
        tree("reset", "--quiet", "--hard")
    elif modules:
        raise Failure(f"{name}: changes {', '.join(modules)} and has no test")

    tree("checkout", "--quiet", "--detach", commit)
    import_modules(python, tree, modules)
    lint(tree, present)
    if before is None:
        say(f"{pin.tag}/{name}: imports, lint clean, nothing to test")
        return
    after = run_tests(pin, python, tree, tests)
    if after.failed:
        raise Failure(
            f"{name}: its own tests fail after it: {', '.join(sorted(after.failed))}\n"
            f"{after.output}"
        )
    bitten = after.passed - before.passed
    if not bitten:
        raise Failure(f"{name}: all of its tests pass without it, so they prove nothing")
    say(
        f"{pin.tag}/{name}: imports, lint clean, {len(after.passed)} tests pass, "
        f"{len(bitten)} of them not before"
    )


def borrow_compiled_code(python: Path, pin: Pin, tree: Git) -> None:
    """Give the working tree what git does not track: compiled code, version, platform."""
    installed = Path(
        run([python, "-c", "import vllm; print(vllm.__path__[0])"], cwd=pin.environment)
        .stdout.splitlines()[-1]
    )  # fmt: skip
    for library in installed.rglob("*.so"):
        place = tree.folder / "vllm" / library.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(library)
    shutil.copy(installed / "_version.py", tree.folder / "vllm" / "_version.py")
    # vLLM reads the name of its platform from the version of an installed `vllm`.
    info = tree.folder.parent / f"vllm-{pin.version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {pin.version}+cpu\n"
    )


def _import_path(tree: Git) -> str:
    return f"{tree.folder}{os.pathsep}{tree.folder.parent}"


def import_modules(python: Path, tree: Git, paths: list[str]) -> None:
    """Compile everything and import what the patch touches.

    Raises:
        Failure: it cannot be.
    """
    run([python, "-m", "compileall", "-q", "vllm"], cwd=tree.folder)
    names = [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run([python, "-c", code, *names], cwd=tree.folder, env={"PYTHONPATH": _import_path(tree)})


def run_tests(pin: Pin, python: Path, tree: Git, tests: list[str]) -> Outcome:
    """Run test files of a working tree against the `vllm` beside them."""
    descriptor, report = tempfile.mkstemp(suffix=".xml")
    os.close(descriptor)
    try:
        done = testing.run_vllm_tests(
            pin,
            python,
            tests,
            f"--junitxml={report}",
            # The recorded numbers of tests are those at the end of the series.
            "--deselect=counts",
            folder=tree.folder,
            env={"PYTHONPATH": _import_path(tree)},
        )
        root = ElementTree.parse(report).getroot()
    except ElementTree.ParseError:
        raise Failure(f"pytest did not run to its end:\n{everything(done)[-4000:]}") from None
    finally:
        Path(report).unlink()
    passed, failed = set(), set()
    for case in root.iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(test)
        elif case.find("skipped") is None:
            passed.add(test)
    return Outcome(frozenset(passed - failed), frozenset(failed), everything(done)[-4000:])
