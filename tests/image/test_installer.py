"""The installer on small packages: those files of the release that it looks at."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile

import pytest

from image.installer.merge import imports
from scripts.pins import ROOT

PROGRAM = ROOT / "image" / "installer"

MERGED = "vllm/config/vllm.py"  # the series changes it, and not all of its functions
ALONE = "vllm/model_executor/models/gemma4.py"  # only one patch of the series is about it
STRANGER = "vllm/v1/spec_decode/eagle.py"  # not of the series


class Site:
    """A folder with vLLM installed, and the installer at work on it in this process."""

    def __init__(self, folder, archive, monkeypatch):
        self.folder = folder
        monkeypatch.setattr(sys, "path", [str(folder), str(PROGRAM), *sys.path])
        monkeypatch.setattr(sys, "argv", [str(archive)])
        spec = importlib.util.spec_from_file_location("gemma4kv", PROGRAM / "__main__.py")
        self.program = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "gemma4kv", self.program)
        spec.loader.exec_module(self.program)
        # whether it behaves is for the tests with all of vLLM
        done = subprocess.CompletedProcess([], 0)
        monkeypatch.setattr(self.program.subprocess, "run", lambda *a, **k: done)

    def write(self, version, files):
        """Install `files` as this version of vLLM."""
        (self.folder / "vllm").mkdir(exist_ok=True)
        parts = ", ".join(version.split("+")[0].split(".")[:3])
        files = files | {
            "vllm/_version.py": f"__version__ = version = {version!r}\n"
            f"__version_tuple__ = version_tuple = ({parts})\n",
            f"vllm-{version}.dist-info/METADATA": f"Name: vllm\nVersion: {version}\n\nText\n",
            f"vllm-{version}.dist-info/direct_url.json": "{}",
        }
        record = f"vllm-{version}.dist-info/RECORD"
        rows = {record: [record, "", ""]}
        for path, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)
            rows[path] = self.program.record_row(path, content)
        self.program.Package(self.folder, (self.folder / record).parent, "", "").write_record(
            rows
        )

    def run(self, command):
        """None, or why it refuses; nothing may have changed then."""
        before = self.state()
        try:
            getattr(self.program, command)()
        except self.program.Refusal as error:
            assert self.state() == before
            return str(error)
        return None

    def text(self, path):
        return (self.folder / path).read_text()

    def edit(self, path, old, new):
        text = self.text(path)
        assert text.count(old) == 1
        return text.replace(old, new)

    def state(self):
        """Content, mode and time of every file."""
        return {
            str(file.relative_to(self.folder)): (
                file.read_bytes(), file.stat().st_mode, file.stat().st_mtime_ns,
            )
            if file.is_file()
            else None
            for file in sorted(self.folder.rglob("*"))
        }  # fmt: skip


@pytest.fixture(scope="session")
def bundle(archive):
    with zipfile.ZipFile(archive) as members:
        contents = {name: members.read(name) for name in members.namelist()}
    return json.loads(contents["manifest.json"]), contents


@pytest.fixture
def release_files(bundle):
    _, contents = bundle
    return {
        name.removeprefix("before/"): content
        for name, content in contents.items()
        if name.startswith("before/")
    }


@pytest.fixture
def site(tmp_path, archive, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    return Site(folder, archive, monkeypatch)


@pytest.fixture
def release(site, pin, release_files):
    """The release itself, of a build for another CUDA."""
    site.write(f"{pin.version}+cu130", release_files)
    return site


@pytest.fixture(scope="session")
def whole_release(release_wheel, bundle):
    """The files that the series touches, and those that they import from."""
    manifest, contents = bundle
    wanted = {name for name in manifest["release_files"] if name == STRANGER}
    for path in manifest["files"]:
        wanted |= {path} & manifest["release_files"].keys()
        for module, _ in imports(contents[f"after/{path}"].decode(), path):
            wanted |= {f"{module}.py", f"{module}/__init__.py"} & manifest[
                "release_files"
            ].keys()
    with zipfile.ZipFile(release_wheel) as members:
        return {name: members.read(name) for name in wanted}


@pytest.fixture
def development(site, pin, whole_release):
    """A function that installs a development build in which these files differ."""

    def installed(changes):
        files = {path: change(whole_release[path].decode()) for path, change in changes.items()}
        site.write(f"{pin.version}.dev6+g6d4a8e6d2", whole_release | files)
        return site

    return installed


def instead(old, new):
    def change(text):
        assert text.count(old) == 1, old
        return text.replace(old, new)

    return change


def test_installs_and_removes(release, pin, bundle, capsys):
    manifest, contents = bundle
    before = release.state()
    assert release.run("check") is None
    assert release.state() == before
    assert (
        f"{len(bundle[0]['files'])} files of the series fit exactly" in capsys.readouterr().out
    )

    assert release.run("install") is None
    version = f"{pin.version}+cu130.{pin.local_version}"
    for path, (_, after) in manifest["files"].items():
        assert (release.folder / path).read_bytes() == contents[f"after/{path}"], path
        assert release.program.digest_of(release.folder / path) == after
    assert f"version = '{version}'" in release.text("vllm/_version.py")
    assert f"'{pin.local_version}')" in release.text("vllm/_version.py")
    (info,) = release.folder.glob("*.dist-info")
    assert info.name == f"vllm-{version}.dist-info"
    assert f"Version: {version}\n" in (info / "METADATA").read_text()
    assert not (info / "direct_url.json").exists()
    package = release.program.installed.find()
    rows = package.record()
    there = {
        str(file.relative_to(release.folder))
        for file in release.folder.rglob("*")
        if file.is_file()
    }
    assert there == rows.keys()
    for path, row in rows.items():
        if row[1]:
            assert row == release.program.record_row(path, (release.folder / path).read_bytes())

    assert "has this series" in release.run("install")
    assert release.run("remove") is None
    assert release.state() == before


def test_what_was_edited_is_refused_by_name(release, pin):
    path = release.folder / MERGED
    path.write_text(path.read_text() + "# mine\n")
    assert f"{MERGED} was edited after it was installed" in release.run("install")


def test_a_release_that_differs_is_refused(site, pin, release_files):
    files = release_files | {MERGED: release_files[MERGED] + b"# not as released\n"}
    site.write(pin.version, files)
    message = site.run("install")
    assert f"{MERGED} differs from the release" in message
    assert "nothing was changed" in message


@pytest.mark.parametrize("version", ["0.18.0", "0.19.2", "0.20.0.dev6+gabc"])
def test_another_release_is_refused(site, pin, release_files, version):
    site.write(version, release_files)
    assert f"is neither {pin.version}" in site.run("check")


def test_nothing_to_change_is_refused(site):
    assert "has no vLLM installed" in site.run("install")


def test_two_packages_are_refused(release, pin, release_files):
    release.write("0.19.0", {})
    assert "more than one vLLM" in release.run("install")


def test_an_edited_file_is_not_lost_by_remove(release):
    assert release.run("install") is None
    path = release.folder / MERGED
    path.write_text(path.read_text() + "# mine\n")
    assert MERGED in release.run("remove")


@pytest.mark.parametrize("writes", [1, 2, 3, 20, 44, 45, 46])
def test_an_interrupted_run_can_be_removed(release, monkeypatch, writes):
    before = release.state()
    replace = release.program.replace
    left = iter(range(writes - 1, -1, -1))

    def interrupted(file, content):
        if next(left) == 0:
            file.with_name(f"{file.name}.new").write_bytes(b"half of ")
            raise KeyboardInterrupt
        replace(file, content)

    monkeypatch.setattr(release.program, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        release.program.install()
    monkeypatch.setattr(release.program, "replace", replace)
    if writes == 1:  # nothing was touched yet
        assert release.run("install") is None
    else:
        assert "interrupted: run `remove`" in release.run("install")
    assert release.run("remove") is None
    assert release.state() == before


def interrupt(patch, owner, name, call):
    """Let the function of that name be interrupted instead of called for that time."""
    original = getattr(owner, name)
    left = iter(range(call - 1, -1, -1))

    def interrupted(*arguments):
        if next(left) == 0:
            raise KeyboardInterrupt
        return original(*arguments)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("copies", [1, 30])
def test_a_run_interrupted_before_it_changes_anything(release, monkeypatch, copies):
    before = release.state()
    with monkeypatch.context() as patch:
        interrupt(patch, release.program.shutil, "copy2", copies)
        with pytest.raises(KeyboardInterrupt):
            release.program.install()
    assert release.run("remove") is None
    assert release.state() == before


def test_remove_can_be_interrupted_too(release, monkeypatch):
    before = release.state()
    assert release.run("install") is None
    with monkeypatch.context() as patch:
        interrupt(patch, release.program.os, "replace", 31)
        with pytest.raises(KeyboardInterrupt):
            release.program.remove()
    assert release.run("remove") is None
    assert release.state() == before


def test_what_does_not_behave_is_taken_out_again(release, monkeypatch):
    before = release.state()
    done = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(release.program.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(release.program.Refusal, match="taken out again"):
        release.program.install()
    assert release.state() == before


def test_a_folder_that_cannot_be_renamed(release, monkeypatch):
    """As in a layer of an image, where the folder is of a layer below."""
    before = release.state()
    rename = type(release.folder).rename

    def refuse(folder, new):
        if folder.suffix == ".dist-info":
            raise OSError(18, "Invalid cross-device link")
        return rename(folder, new)

    monkeypatch.setattr(type(release.folder), "rename", refuse)
    assert release.run("install") is None
    assert release.run("remove") is None
    assert release.state() == before


# --- development builds ---


def test_a_change_elsewhere_in_a_file_is_kept(development, bundle):
    site = development(
        {MERGED: instead("def compile_debug_dump_path", "def compile_debug_dump_path_")}
    )
    assert site.run("install") is None
    _, contents = bundle
    after = contents[f"after/{MERGED}"].decode()
    assert site.text(MERGED) == after.replace(
        "def compile_debug_dump_path", "def compile_debug_dump_path_"
    )
    (state,) = site.folder.glob("*/gemma4kv/installed.json")
    assert json.loads(state.read_text())["merged"] == [MERGED]


def test_a_change_where_the_series_changes_is_refused_by_name(development):
    name = "def _post_init_kv_transfer_config(self"
    site = development({MERGED: instead(f"{name})", f"{name}, now=1)")})
    message = site.run("install")
    assert "differs in what the series changes: VllmConfig._post_init_kv_transfer" in message


def test_a_patch_that_stands_alone_is_left_out(development, bundle, capsys):
    site = development({ALONE: lambda text: text.replace("residual = None", "residual = 0")})
    before = site.text(ALONE)
    assert site.run("install") is None
    assert site.text(ALONE) == before
    assert "left out, as its files differ here: [Bugfix][Model]" in capsys.readouterr().out


def test_a_caller_of_what_is_gone_is_refused(development, bundle):
    manifest, _ = bundle
    name = manifest["gone"][0]
    site = development({STRANGER: lambda text: f"{text}\n\ndef use(it):\n    it.{name}()\n"})
    message = site.run("install")
    assert f"{STRANGER} differs from the release and uses what changes: {name}" in message


def test_an_import_that_would_fail_is_refused(development):
    path = "vllm/utils/mem_utils.py"
    site = development({path: lambda text: text.replace("format_gib", "format_gibibytes")})
    message = site.run("install")
    assert (
        "would import format_gib from vllm/utils/mem_utils.py, which does not have it"
        in message
    )


# --- all of vLLM ---


def test_in_a_virtual_environment(make_environment, release_wheel):
    """The conditions are those that tell the series from the release."""
    environment = make_environment(release_wheel)
    before = environment.files()
    script = (
        "import postconditions as p; print([text for text, wrong in p.check() if not wrong])"
    )
    asked = subprocess.run(
        [environment.python, "-B", "-c", script], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(PROGRAM), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert asked.stdout.splitlines()[-1] == "[]", asked.stdout + asked.stderr

    status, output = environment("install")
    assert status == 0, output
    assert output.count("  yes: ") == 6
    status, output = environment("remove")
    assert status == 0, output
    assert environment.files() == before
