"""An image for real: built by buildah on a stand-in base, and serving from it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest
import standin

from scripts import image, verify_server
from scripts.pins import ROOT
from scripts.shell import Failure

BASE, RESULT = "localhost/standin/vllm-openai:base", "localhost/gemma4kv/test:latest"
EMPTY = "localhost/standin/empty:latest"
USER = "2000:0"
BASE_DOCKERFILE = f"""\
FROM scratch
COPY root/ /
ENV PATH=/usr/local/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/lib \\
    PYTHONPATH={standin.DEPENDENCIES} HOME=/tmp
WORKDIR /vllm-workspace
USER {USER}
EXPOSE 8000
LABEL maintainer=somebody
ENTRYPOINT ["vllm", "serve"]
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory, buildah):
    """Images of this test only, and gone after it."""
    folder = tmp_path_factory.mktemp("storage")
    settings = {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
    (folder / "storage.conf").write_text(
        "[storage]\n"
        f'driver = "overlay"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
    )
    previous = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield folder
    subprocess.run([buildah, "rm", "--all"], stdout=subprocess.DEVNULL)
    subprocess.run([buildah, "rmi", "--all", "--force"], stdout=subprocess.DEVNULL)
    for name, value in previous.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="module")
def mounts(pin, dependencies) -> tuple[str, ...]:
    """The machine's libraries, and the dependencies of vLLM."""
    places = {dependencies: standin.DEPENDENCIES, pin.environment: pin.environment}
    places |= {folder: folder for folder in ("/usr/bin", "/usr/lib", "/usr/lib64")}
    return tuple(f"--volume={here}:{there}:ro" for here, there in places.items())


@pytest.fixture(scope="module")
def base(storage, buildah, release_wheel, tmp_path_factory) -> str:
    context = tmp_path_factory.mktemp("base")
    root = standin.root_filesystem(context / "root")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-index", "--no-compile", "--no-warn-script-location",
         "--prefix", root / "usr" / "local", release_wheel],
        check=True,
    )  # fmt: skip
    script = root / "usr" / "local" / "bin" / "vllm"
    _, *lines = script.read_text().splitlines(True)
    script.write_text("".join(["#!/usr/local/bin/python3\n", *lines]))
    (context / "Dockerfile").write_text(BASE_DOCKERFILE)
    subprocess.run([buildah, "build", "--quiet", "--tag", BASE, context], check=True)
    return BASE


@pytest.fixture(scope="module")
def result(pin, base, mounts) -> str:
    engine = image.Engine("buildah")
    return image.build(pin, base, name=RESULT, engine=engine, variant="cpu", options=mounts)


@pytest.fixture(scope="module")
def config(result) -> dict:
    return image.Engine("buildah").config(result)


def top_layer(storage: Path, name: str) -> set[str]:
    """The files of an image's last layer; those that it deletes are in it too."""
    graph = storage / "graph"
    images = json.loads((graph / "overlay-images" / "images.json").read_text())
    (found,) = [each for each in images if name in each.get("names", [])]
    layer = graph / "overlay" / found["layer"] / "diff"
    return {f"/{path.relative_to(layer)}" for path in layer.rglob("*") if not path.is_dir()}


def test_started_as_the_base_is(config):
    assert config["Entrypoint"] == ["vllm", "serve"]
    assert config["User"] == USER
    assert config["WorkingDir"] == "/vllm-workspace"
    assert config["ExposedPorts"] == {"8000/tcp": {}} or "8000" in str(config["ExposedPorts"])


def test_labels(config, pin, base):
    labels = config["Labels"]
    assert labels["maintainer"] == "somebody"
    assert labels["org.opencontainers.image.version"] == pin.full_version
    assert labels["org.opencontainers.image.base.name"] == base
    assert labels["org.opencontainers.image.base.digest"].startswith("sha256:")
    assert len(labels["gemma4kv.series.sha256"]) == 64


def test_the_layer_holds_what_changed_and_nothing_else(result, storage, pin):
    effect = standin.series.net_effect(standin.series.read(pin.series))
    touched = {path for path in effect if path.startswith("vllm/")} | {"vllm/_version.py"}
    places = {path for path in top_layer(storage, RESULT) if ".dist-info" not in path}
    site = f"/usr/local/lib/python{sysconfig.get_python_version()}/site-packages"
    sources = {
        re.sub(r"__pycache__/(\w+)\.[\w-]+\.pyc$", r"\1.py", path.removeprefix(f"{site}/"))
        for path in places
    }
    assert sources == touched
    assert {f"{site}/{path}" for path in touched} <= places


@pytest.fixture(scope="module")
def server(result, config, mounts, buildah, pin, tmp_path_factory):
    """`vllm serve` in a container of the image, as its user."""
    folder = tmp_path_factory.mktemp("serving")
    folder.chmod(0o755)
    model = folder / "model"
    python = pin.environment / "bin" / "python"
    engine = ROOT / "tests" / "engine"
    subprocess.run([python, engine / "checkpoints.py", "gemma4-31b", model], check=True)
    (model / "model.safetensors").chmod(0o644)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run([buildah, "from", result], check=True, capture_output=True, text=True)
    container = done.stdout.strip()
    kv_transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TimedSpec",
            "spec_module_path": "timed_memory_spec",
            "cpu_bytes_to_use": "96MiB",
        },
    }
    path = f"{standin.DEPENDENCIES}:/plugins"
    settings = {
        "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = [
        buildah, "run", *mounts,
        f"--volume={model}:/model:ro", f"--volume={engine / 'plugins'}:/plugins:ro",
        *(f"--env={name}={value}" for name, value in settings.items()),
        container, "--", *config["Entrypoint"], "/model", "--host=127.0.0.1", f"--port={port}",
        "--dtype=float32", "--block-size=32", "--enforce-eager", "--max-model-len=1024",
        "--max-num-seqs=4", "--num-gpu-blocks-override=200", "--served-model-name=gemma",
        f"--kv-transfer-config={json.dumps(kv_transfer)}",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}", log
    finally:
        end(process)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + 240
    while time.monotonic() < until and process.poll() is None:
        try:
            with direct.open(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise AssertionError(
        f"the server in the image does not answer; the end of its log:\n{tail}"
    )


def end(process: subprocess.Popen) -> None:
    """And all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def test_serves_and_offloads(server, capsys):
    """As the command for people finds it."""
    url, log = server
    assert verify_server.main(["--url", url, "--log", str(log), "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "works"
    assert report["server"]["version"].endswith("gemma4kv.1")
    assert report["offloading"]["bytes"] == pytest.approx(96 << 20, rel=0.1)
    measured = report["measured"]
    assert measured["tokens_from_host"] > 0.9 * measured["prompt_tokens"]
    assert measured["bytes_loaded"] > 0
    assert measured["answers_agree"]


def test_a_base_without_vllm(storage, buildah, pin, tmp_path, capfd):
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    subprocess.run([buildah, "build", "--quiet", "--tag", EMPTY, tmp_path], check=True)
    with pytest.raises(Failure, match=f"no image was made of {EMPTY}, for the reason above"):
        image.build(pin, EMPTY, engine=image.Engine("buildah"), variant="cpu")
    assert "Error: " in capfd.readouterr().err


# --- without an engine ---


def test_no_engine_is_said_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="none of docker, podman, buildah works .* installer"):
        image.find_engine()


def test_an_engine_that_is_none():
    with pytest.raises(Failure, match="ENGINE=kaniko is not known; choose from docker, podman"):
        image.find_engine("kaniko")


def test_the_base_of_another_pin(pin):
    with pytest.raises(Failure, match=r"is of v0\.33\.0, .* of v0\.19\.1: add PIN=v0\.33\.0"):
        image.build(pin, "vllm/vllm-openai:v0.33.0@sha256:1", engine=image.Engine("none"))


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("vllm/vllm-openai:gemma4", "docker.io/vllm/vllm-openai:gemma4"),
        ("debian", "docker.io/library/debian"),
        ("ghcr.io/a/b", "ghcr.io/a/b"),
        ("localhost/a", "localhost/a"),
        ("here:5000/a", "here:5000/a"),
    ],
)
def test_a_base_that_cannot_be_pulled(monkeypatch, tmp_path, short, full):
    """Only docker finds short names without being told where."""
    (tmp_path / "podman").write_text("#!/bin/sh\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(Failure, match=f"podman cannot pull {full}, for the reason above"):
        image.Engine("podman").fetch(short)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"Entrypoint": ["sh"]}, r"Entrypoint is \['sh'\], was \['vllm', 'serve'\]"),
        ({"User": "root"}, "User is root, was 2000"),
        ({"Env": []}, "Env is"),
    ],
)
def test_an_image_that_starts_otherwise_is_refused(changed, message):
    before = {"Entrypoint": ["vllm", "serve"], "User": "2000", "Env": ["A=1"], "Cmd": None}
    image._check_config(before, dict(before))
    with pytest.raises(Failure, match=message):
        image._check_config(before, before | changed)
