"""The pinned vLLM releases: one file each in `upstream/`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomlkit
from packaging.version import Version

from scripts.shell import Failure

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "v0.19.1"


@dataclass(frozen=True)
class Artefact:
    """A file of a package index, named by project, file name and SHA-256."""

    project: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A wheel to repack.

    Attributes:
        artefact: the wheel as published.
        whole_package: take every Python file from the checkout, for want of a
            published wheel of this very release, instead of only those that the
            series touches.
        keep: files that stay as published even so.
    """

    artefact: Artefact
    whole_package: bool
    keep: frozenset[str]


@dataclass(frozen=True)
class Pin:
    """One pinned release and the places that belong to it.

    Attributes:
        tag: name of the release, of its file in `upstream/` and of its series.
        commit: object id of the tag's commit, or a prefix of it.
        version: version of the release, without a `v`.
        local_version: suffix of the wheels' version.
        released: time stamp in the wheels, in seconds since 1970.
        repository: where the tag can be fetched.
        base_tree: git tree of the release as imported; empty in a new pin.
        patched_tree: git tree after the series; empty in a new pin.
        wheels: by variant (`cuda`, `cpu`) and architecture.
        upstream_tests: paths in vLLM's `tests/`.
        root: the project's folder.
    """

    tag: str
    commit: str
    version: str
    local_version: str
    released: int
    repository: str
    base_tree: str
    patched_tree: str
    sdist: Artefact
    wheels: dict[str, dict[str, Wheel]]
    upstream_tests: tuple[str, ...]
    root: Path

    @property
    def file(self) -> Path:
        return self.root / "upstream" / f"{self.tag}.toml"

    @property
    def series(self) -> Path:
        return self.root / "patches" / self.tag

    @property
    def checkout(self) -> Path:
        return self.root / "build" / "src" / self.tag

    @property
    def environment(self) -> Path:
        return self.root / "build" / "env" / self.tag

    @property
    def dist(self) -> Path:
        return self.root / "build" / "dist" / self.tag

    @property
    def full_version(self) -> str:
        return f"{self.version}+{self.local_version}"

    def wheel(self, variant: str, arch: str) -> Wheel:
        try:
            return self.wheels[variant][arch]
        except KeyError:
            known = [f"VARIANT={v} ARCH={a}" for v, by in self.wheels.items() for a in by]
            raise Failure(
                f"{self.tag} has no wheel for VARIANT={variant} ARCH={arch}; "
                f"it has {', '.join(known)}"
            ) from None

    def record_trees(self, base: str, patched: str) -> None:
        """Write what was imported and what the series makes of it into the pin's file."""
        document = tomlkit.parse(self.file.read_text())
        document["base_tree"] = base
        document["patched_tree"] = patched
        self.file.write_text(tomlkit.dumps(document))


def tags(root: Path = ROOT) -> list[str]:
    return sorted(path.stem for path in (root / "upstream").glob("v*.toml"))


def newest(root: Path = ROOT) -> str:
    """The release on which upstream pull requests are based."""
    return max(tags(root), key=Version)


def load(tag: str, root: Path = ROOT) -> Pin:
    """Read `upstream/<tag>.toml`.

    Raises:
        Failure: there is no such pin, or its file lacks something.
    """
    path = root / "upstream" / f"{tag}.toml"
    if not path.is_file():
        raise Failure(f"PIN={tag} is not known; choose from {', '.join(tags(root))}")
    try:
        raw = tomllib.loads(path.read_text())
        return Pin(
            tag=tag,
            commit=raw["commit"],
            version=raw["version"],
            local_version=_local_version(raw["local_version"]),
            released=int(raw["released"].timestamp()),
            repository=raw["repository"],
            base_tree=raw["base_tree"],
            patched_tree=raw["patched_tree"],
            sdist=_artefact(raw["sdist"]),
            wheels={
                variant: {
                    arch: Wheel(
                        _artefact(wheel),
                        wheel.get("whole_package", False),
                        frozenset(wheel.get("keep", [])),
                    )
                    for arch, wheel in by_arch.items()
                }
                for variant, by_arch in raw["wheels"].items()
            },
            upstream_tests=tuple(raw["upstream_tests"]),
            root=root,
        )
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{path.name}: not valid TOML: {error}") from None
    except KeyError as error:
        raise Failure(f"{path.name}: {error} is missing") from None


def _artefact(raw: dict) -> Artefact:
    return Artefact(raw["project"], raw["file"], raw["sha256"])


def _local_version(label: str) -> str:
    # vLLM takes itself for a CPU build when its version contains these letters.
    if "cpu" in label:
        raise Failure(f"local_version {label!r} must not contain the letters 'cpu'")
    return label
