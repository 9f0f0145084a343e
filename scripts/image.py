"""Build an image with the series: one layer on an official one."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts import installer, pins, wheel
from scripts.pins import ROOT, Pin
from scripts.shell import Failure, run, say

_DOCKERFILE = ROOT / "image" / "Dockerfile"
_ENGINES = ("docker", "podman", "buildah")
# What a container of the image is started with; the layer must leave it alone.
_KEPT = (
    "Entrypoint", "Cmd", "User", "WorkingDir", "Env", "ExposedPorts", "Volumes", "StopSignal",
    "Healthcheck",
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """One of the programs that build images; they agree on nearly everything."""

    name: str

    def inspect(self, image: str) -> dict | None:
        """What an image here says about itself, or None."""
        command = (
            ["image", "inspect"] if self.name != "buildah" else ["inspect", "--type=image"]
        )
        done = run([self.name, *command, image], check=False)
        if done.returncode:
            return None
        found = json.loads(done.stdout)
        return found[0] if isinstance(found, list) else found

    def config(self, image: str) -> dict:
        found = self.inspect(image)
        if found is None:
            raise Failure(f"{self.name} does not find the image {image}")
        return found["Docker"]["config"] if "Docker" in found else found["Config"]

    def digest(self, image: str) -> str:
        """Of the manifest, as far as the engine knows it."""
        named = image.partition("@")[2]
        found = self.inspect(image) or {}
        known = [known.partition("@")[2] for known in found.get("RepoDigests") or []]
        return named or next(iter(known), "") or found.get("FromImageDigest", "")

    def fetch(self, image: str) -> str:
        """Have an image here, and return the name by which the engine knows it.

        Raises:
            Failure: it is not here, and cannot be pulled.
        """
        if self.inspect(image) is not None:
            return image
        image = _with_registry(image)
        if run([self.name, "pull", image], check=False, capture=False).returncode:
            raise Failure(
                f"{self.name} cannot pull {image}, for the reason above. BASE= names the image "
                "to build on; one that is on this machine is not pulled"
            )
        return image


def _with_registry(image: str) -> str:
    """The full name of an image that docker finds under its short one; others may not."""
    first, slash, _ = image.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def default_base(pin: Pin) -> str:
    return f"vllm/vllm-openai:{pin.tag}"


def find_engine(chosen: str | None = None) -> Engine:
    """The chosen engine, or the first that works."""
    if chosen and chosen not in _ENGINES:
        raise Failure(f"ENGINE={chosen} is not known; choose from {', '.join(_ENGINES)}")
    tried = [chosen] if chosen else _ENGINES
    for name in tried:
        if shutil.which(name) and run([name, "info"], check=False).returncode == 0:
            return Engine(name)
    raise Failure(
        f"no image can be built: none of {', '.join(tried)} works here. Without one, `make "
        "installer` makes a file that changes a vLLM in a virtual environment or container"
    )


def build(
    pin: Pin,
    base: str | None = None,
    *,
    name: str | None = None,
    engine: Engine | None = None,
    variant: str = "cuda",
    arch: str | None = None,
    options: tuple[str, ...] = (),
) -> str:
    """Make the image and return its name.

    Args:
        pin: whose series.
        base: the image to build on, best with its digest.
        name: of the new image.
        engine: that builds it.
        variant: wheel to take the files from; they are the same in all.
        arch: likewise.
        options: for the engine.

    Raises:
        Failure: the base is not what the series is for, or the image is started otherwise.
    """
    base = base or default_base(pin)
    name = name or f"gemma4kv/vllm-openai:{pin.tag}-{pin.local_version}"
    engine = engine or find_engine()
    _refuse_other_pin(pin, base)
    base = engine.fetch(base)
    archive = installer.build(pin, wheel.build(pin, variant, arch or wheel.host_arch()))
    before = engine.config(base)
    context = pin.root / "build" / "image" / pin.tag
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    shutil.copy(_DOCKERFILE, context / "Dockerfile")
    shutil.copy(archive, context / "installer.pyz")
    arguments = {"BASE": base, "BASE_USER": before.get("User") or "root"}
    command: list[str | Path] = [engine.name, "build", "--tag", name, *options]
    for key, value in arguments.items():
        command += ["--build-arg", f"{key}={value}"]
    for key, value in _labels(pin, base, engine.digest(base), archive).items():
        command += ["--label", f"{key}={value}"]
    if run([*command, context], check=False, capture=False).returncode:
        raise Failure(f"no image was made of {base}, for the reason above")
    _check_config(before, engine.config(name))
    say(f"{pin.tag}: image {name}, on {base}")
    return name


def _refuse_other_pin(pin: Pin, base: str) -> None:
    """Before an image of 20 GB is pulled."""
    tag = base.partition("@")[0].rpartition(":")[2]
    if tag != pin.tag and tag in pins.tags():
        raise Failure(f"{base} is of {tag}, the series of {pin.tag}: add PIN={tag}")


def _labels(pin: Pin, base: str, digest: str, archive: Path) -> dict[str, str]:
    manifest = installer.manifest(archive)
    found = {
        "org.opencontainers.image.title": "vLLM with Gemma 4 KV-cache offloading",
        "org.opencontainers.image.version": pin.full_version,
        "org.opencontainers.image.revision": manifest["project_revision"],
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": base.partition("@")[0],
        "org.opencontainers.image.base.digest": digest,
        "gemma4kv.pin": pin.tag,
        "gemma4kv.series.sha256": manifest["series"],
    }
    return {key: value for key, value in found.items() if value}


def _check_config(before: dict, after: dict) -> None:
    def of(config: dict, key: str):
        value = config.get(key) or None
        return value or "root" if key == "User" else value

    changed = [key for key in _KEPT if of(before, key) != of(after, key)]
    if changed:
        text = ", ".join(f"{key} is {after.get(key)}, was {before.get(key)}" for key in changed)
        raise Failure(f"the image is not started as its base is: {text}")
