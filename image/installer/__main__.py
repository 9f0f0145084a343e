"""Put the series into a vLLM that is installed already, or take it out again.

Run this with the Python that has vLLM, and not while a server runs from it:

    python vllm-...-installer.pyz check      # look, and change nothing
    python vllm-...-installer.pyz install
    python vllm-...-installer.pyz verify     # is what is installed what it should be?
    python vllm-...-installer.pyz remove     # everything as it was
"""

import argparse
import ast
import errno
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

import merge
import package as installed
import postconditions
from package import Package, Refusal, digest, digest_of, record_row, replace

# In the .dist-info: what was there before, and a file that says what was done.
OURS = "gemma4kv"
STATE = "installed.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["check", "install", "verify", "remove"])
    command = parser.parse_args().command
    try:
        {"check": check, "install": install, "verify": verify, "remove": remove}[command]()
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename}", file=sys.stderr)
        return 1
    return 0


class Bundle:
    """What this file carries: the series' Python files, and those it was made for."""

    def __init__(self) -> None:
        self._zip = zipfile.ZipFile(sys.argv[0])
        self.manifest = json.loads(self._zip.read("manifest.json"))
        # path -> SHA-256 before and after; None where there is no file
        self.files: dict[str, tuple[str | None, str | None]] = {
            path: tuple(pair) for path, pair in self.manifest["files"].items()
        }

    def before(self, path: str) -> bytes:
        return self._zip.read(f"before/{path}")

    def after(self, path: str) -> bytes:
        return self._zip.read(f"after/{path}")


@dataclass
class Plan:
    """What to write where; None to delete."""

    package: Package
    version: str
    files: dict[str, bytes | None] = field(default_factory=dict)
    merged: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)


def check() -> None:
    plan = make_plan(Bundle())
    describe(plan)
    print("Nothing was changed; `install` does it.")


def install() -> None:
    bundle = Bundle()
    plan = make_plan(bundle)
    describe(plan)
    carry_out(plan, bundle)
    print(
        f"Installed: {plan.package.name} {plan.version}. Checking what it does now:", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="gemma4kv-") as scratch:
        # imports may leave settings and caches at home
        aside = {name: scratch for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
        done = subprocess.run(
            [sys.executable, "-B", sys.argv[0], "verify"], env={**os.environ, **aside}
        )
    if done.returncode:
        remove()
        raise Refusal(
            "what was installed does not do what it should, so it was taken out again"
        )


def verify() -> None:
    """Files, metadata, and behaviour."""
    package = installed.find()
    state = _state(package)
    problems = [
        f"{path} is not as it was installed"
        for path, wanted in state["files"].items()
        if digest_of(package.site / path) != wanted
    ]
    rows = package.record()
    for path in state["files"]:
        file = package.site / path
        if file.is_file() and rows.get(path) != record_row(path, file.read_bytes()):
            problems.append(f"RECORD is wrong about {path}")
        if file.is_file() and not Path(cache_from_source(str(file))).is_file():
            problems.append(f"{path} is not compiled")
    found = import_module("vllm._version").__version__
    if package.version != state["version"] or not found.endswith(state["label"]):
        problems.append(f"the version is {found}, {package.version} or {state['version']}")
    if problems:
        raise Refusal("; ".join(problems))
    unmet = 0
    for text, wrong in postconditions.check():
        print(f"  {'no: ' if wrong else 'yes: '}{text}{f' ({wrong})' if wrong else ''}")
        unmet += wrong is not None
    if unmet:
        raise Refusal(f"{unmet} of {len(postconditions.CONDITIONS)} conditions are not met")


def remove() -> None:
    package = installed.find()
    state = _state(package)
    _refuse_read_only(package, state["files"])
    if state["complete"]:
        edited = [p for p, d in state["files"].items() if digest_of(package.site / p) != d]
        if edited:
            raise Refusal(
                "these files were changed since the series was installed, and would be lost: "
                + ", ".join(edited)
            )
    _write_state(package.info / OURS, {**state, "complete": False})
    before = package.info / OURS / "before"
    for path in state["places"]:
        target = package.site / path
        if path.startswith("dist-info/"):
            target = package.info / path.removeprefix("dist-info/")
        target.with_name(f"{target.name}.new").unlink(missing_ok=True)
        if (before / path).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(before / path, target)
        elif path not in state["there"]:
            target.unlink(missing_ok=True)  # else the run broke off before it was touched
    for folder in map(Path, state["folders"]):  # the deepest first
        _remove_if_empty(package.site / folder)
    shutil.rmtree(package.info / OURS)
    if package.info.name != state["was"]["info"]:
        _rename(package.info, package.info.with_name(state["was"]["info"]))
    print(f"Removed: {package.name} is {state['was']['version']} as before.")


def make_plan(bundle: Bundle) -> Plan:
    """Look at every file that the series touches, and decide.

    Raises:
        Refusal: the series does not belong into what is installed.
    """
    manifest = bundle.manifest
    package = installed.find()
    if (package.info / OURS / STATE).exists():
        state = _state(package)
        if not state["complete"]:
            raise Refusal("an earlier run was interrupted: run `remove`, then `install` again")
        same = state["series"] == manifest["series"]
        what = (
            "this series already"
            if same
            else "another state of the series: run its `remove` first"
        )
        raise Refusal(f"{package.version} in {package.site} has {what}")
    if manifest["local_version"] in package.version:
        raise Refusal(f"{package.version} in {package.site} is a wheel of this project already")
    development = package.release.startswith(f"{manifest['release']}.dev")
    if package.release != manifest["release"] and not development:
        raise Refusal(
            f"{package.name} {package.version} in {package.site} is neither "
            f"{manifest['release']}, which this is for, nor a development build of it"
        )
    plan = Plan(package, _labelled(package.version, manifest["local_version"]))
    conflicts = _compare(plan, bundle, development)
    if development:
        plan.left_out, conflicts = _leave_out(plan, manifest["patches"], conflicts)
        conflicts |= _callers(plan, manifest) | _imports(plan, manifest)
    if conflicts:
        listing = "\n".join(f"  {path} {why}" for path, why in sorted(conflicts.items()))
        raise Refusal(
            f"{package.name} {package.version} in {package.site} is not what the series was "
            f"made for, and nothing was changed:\n{listing}"
        )
    for path, content in plan.files.items():
        if content is not None:
            compile(content, path, "exec")
    _refuse_read_only(package, plan.files)
    return plan


def _compare(plan: Plan, bundle: Bundle, development: bool) -> dict[str, str]:
    """Fill in the plan; the files for which there is none, each with the reason."""
    package = plan.package
    conflicts = {}
    rows = package.record()
    for path, (before, after) in bundle.files.items():
        file = package.site / path
        found = digest_of(file)
        if found == before:
            plan.files[path] = bundle.after(path) if after else None
        elif before is None:
            conflicts[path] = "exists, where the series adds a file"
        elif found is None:
            conflicts[path] = "is missing"
        elif rows.get(path) != record_row(path, file.read_bytes()):
            conflicts[path] = "was edited after it was installed"
        elif not development or after is None:
            conflicts[path] = "differs from the release"
        else:
            texts = (bundle.before(path), bundle.after(path), file.read_bytes())
            try:
                merged = merge.merge(*(text.decode() for text in texts))
            except merge.Conflict as error:
                conflicts[path] = str(error)
            else:
                plan.files[path] = merged.encode()
                plan.merged.append(path)
    version_file = package.site / installed.VERSION_FILE
    plan.files[installed.VERSION_FILE] = _with_version(
        version_file.read_text(), bundle.manifest["local_version"]
    ).encode()
    for path, digest_in_release in bundle.manifest["release_files"].items():
        if path not in plan.files and path not in conflicts:
            found = digest_of(package.site / path)
            if found not in (None, digest_in_release):
                plan.foreign.append(path)
    return conflicts


def _leave_out(
    plan: Plan, patches: list[dict], conflicts: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Do without patches that conflict, if each stands alone in all the files it touches."""
    left_out = []
    for patch in patches:
        if patch["separable"] and conflicts.keys() & set(patch["files"]):
            left_out.append(patch["subject"])
            conflicts = {p: why for p, why in conflicts.items() if p not in patch["files"]}
            for path in patch["files"]:
                plan.files.pop(path, None)
    return left_out, conflicts


def _callers(plan: Plan, manifest: dict) -> dict[str, str]:
    """Files that differ from the release and name what the series does away with."""
    gone = set(manifest["gone"])
    found = {}
    for path in plan.foreign:
        words = merge.identifiers((plan.package.site / path).read_text())
        if used := sorted(gone & words):
            found[path] = f"differs from the release and uses what changes: {', '.join(used)}"
    return found


def _imports(plan: Plan, manifest: dict) -> dict[str, str]:
    """Files of the series that import what files that differ do not have."""
    site, found = plan.package.site, {}
    for path, content in plan.files.items():
        for module, name in merge.imports((content or b"").decode(), path):
            for place in (f"{module}.py", f"{module}/__init__.py"):
                missing = place in manifest["release_files"] and not (site / place).is_file()
                if place in plan.files or not (missing or place in plan.foreign):
                    continue
                names = set() if missing else merge.identifiers((site / place).read_text())
                if not names & {name, "*"} and not any(site.glob(f"{module}/{name}*")):
                    found[path] = f"would import {name} from {place}, which does not have it"
    return found


def _with_version(text: str, label: str) -> str:
    """The text of _version.py, which may lack labels that the metadata has, such as +cu130."""
    found = re.search(
        r"^__version__ = version = '(.+)'\n__version_tuple__ = version_tuple = (\(.+\))$",
        text,
        re.M,
    )
    if found is None:
        raise Refusal(f"{installed.VERSION_FILE} does not look as it does in any build of vLLM")
    version, parts = found[1], ast.literal_eval(found[2])
    new = _labelled(version, label)
    *most, last = parts
    with_local = "+" in version and isinstance(last, str)
    new_parts = (*most, f"{last}.{label}") if with_local else (*parts, label)
    return text.replace(
        found[0],
        f"__version__ = version = {new!r}\n__version_tuple__ = version_tuple = {new_parts}",
    )


def _labelled(version: str, label: str) -> str:
    return f"{version}{'.' if '+' in version else '+'}{label}"


def describe(plan: Plan) -> None:
    package = plan.package
    print(f"{package.name} {package.version} in {package.site}")
    exact = len(plan.files) - len(plan.merged) - 1
    print(f"  {exact} files of the series fit exactly")
    for path in sorted(plan.merged):
        print(f"  {path} differs elsewhere, and the change fits")
    for subject in plan.left_out:
        print(f"  left out, as its files differ here: {subject}")
    if plan.foreign:
        print(f"  {len(plan.foreign)} other files are not those of the release, and stay:")
        for path in plan.foreign:
            print(f"    {path}")


def carry_out(plan: Plan, bundle: Bundle) -> None:
    """Keep what is there, then change it; the new name of the .dist-info comes last."""
    package = plan.package
    ours = package.info / OURS
    shutil.rmtree(ours, ignore_errors=True)  # of a run that broke off before it began
    ours.mkdir()
    places = {}
    for path in plan.files:
        for place in (path, _compiled(path)):
            places[place] = package.site / place
    for name in ("METADATA", "RECORD", "direct_url.json"):
        places[f"dist-info/{name}"] = package.info / name
    target = package.info.with_name(package.info.name.replace(package.version, plan.version))
    state = {
        "complete": False,
        "version": plan.version,
        "label": bundle.manifest["local_version"],
        "was": {"version": package.version, "info": package.info.name},
        "pin": bundle.manifest["pin"],
        "series": bundle.manifest["series"],
        "project_revision": bundle.manifest["project_revision"],
        "files": {path: content and digest(content) for path, content in plan.files.items()},
        "places": list(places),
        "there": [place for place, file in places.items() if file.is_file()],
        "folders": _new_folders(package.site, plan),
        "merged": plan.merged,
        "left_out": plan.left_out,
        "not_of_the_release": plan.foreign,
    }
    _write_state(ours, state)
    for place in state["there"]:
        _keep(places[place], ours / "before" / place)

    rows = package.record()
    for path, content in plan.files.items():
        file = package.site / path
        if content is None:
            for place in (path, _compiled(path)):
                (package.site / place).unlink(missing_ok=True)
                rows.pop(place, None)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        replace(file, content)
        # by content: a layer of an image may not keep the time of a file
        py_compile.compile(
            str(file), doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH,
        )  # fmt: skip
        rows[path] = record_row(path, content)
        rows[_compiled(path)] = [_compiled(path), "", ""]

    metadata = (package.info / "METADATA").read_text()
    line = f"Version: {package.version}\n"
    replace(
        package.info / "METADATA",
        metadata.replace(line, f"Version: {plan.version}\n", 1).encode(),
    )
    (package.info / "direct_url.json").unlink(missing_ok=True)
    state["complete"] = True
    _write_state(ours, state)
    prefix = f"{package.info.name}/"
    rows = {path: row for path, row in rows.items() if not path.startswith(prefix)}
    for file in sorted(package.info.rglob("*")):
        path = f"{target.name}/{file.relative_to(package.info).as_posix()}"
        if file.is_file() and file != package.info / "RECORD":
            rows[path] = record_row(path, file.read_bytes())
    rows[f"{target.name}/RECORD"] = [f"{target.name}/RECORD", "", ""]
    package.write_record(rows)
    _rename(package.info, target)


def _state(package: Package) -> dict:
    file = package.info / OURS / STATE
    if not file.is_file():
        raise Refusal(
            f"{package.name} {package.version} in {package.site} was not changed by `install`"
        )
    return json.loads(file.read_text())


def _write_state(ours: Path, state: dict) -> None:
    replace(ours / STATE, (json.dumps(state, indent=1) + "\n").encode())


def _keep(file: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    partial = copy.with_name(f"{copy.name}.new")
    shutil.copy2(file, partial)
    if os.geteuid() == 0:
        os.chown(partial, file.stat().st_uid, file.stat().st_gid)
    os.replace(partial, copy)


def _compiled(path: str) -> str:
    return Path(cache_from_source(path)).as_posix()


def _new_folders(site: Path, plan: Plan) -> list[str]:
    """The folders that are not there yet, the deepest first."""
    found = set()
    for path in plan.files:
        folders = [*Path(path).parents][:-1]
        found |= {str(folder) for folder in folders if not (site / folder).exists()}
    caches = {str(Path(path).parent / "__pycache__") for path in plan.files}
    found |= {folder for folder in caches if not (site / folder).exists()}
    return sorted(found, key=len, reverse=True)


def _rename(folder: Path, new: Path) -> None:
    try:
        folder.rename(new)
    except OSError as error:
        # In an image's layer, a folder of the layers below cannot be renamed.
        if error.errno != errno.EXDEV:
            raise
        copy = folder.with_name(f"{new.name}.partial")
        shutil.copytree(folder, copy)
        shutil.rmtree(folder)
        copy.rename(new)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _refuse_read_only(package: Package, paths) -> None:
    folders = {package.site, package.info}
    for path in paths:
        folder = (package.site / path).parent
        while not folder.exists():
            folder = folder.parent
        folders.add(folder)
    if closed := sorted(str(f) for f in folders if not os.access(f, os.W_OK)):
        raise Refusal(f"{closed[0]} cannot be written to; run this as the user who owns it")


if __name__ == "__main__":
    sys.exit(main())
