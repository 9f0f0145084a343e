"""The sizes in `deploy/` are those of the plan, and the flags are ones that the pin has."""

import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from scripts.capacity import GIB, Question, plan

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ONE_NODE = Question(model="31b", tensor_parallel=2, offloading_size=120)
TWO_NODES = Question(
    model="31b", tensor_parallel=2, pipeline_parallel=2, nodes=2, offloading_size=240
)
# For NCCL and torch, beside the pool.
SHARED_MEMORY_RESERVE = 8 * GIB
VARIABLES = {"HEAD": "10.0.0.1", "NODE": "1", "HOME": "/home/me"}


def docker_run(script: str, folder: Path) -> tuple[list[str], list[str]]:
    """What the script gives to docker, and to vLLM in the container."""
    docker = folder / "docker"
    docker.write_text(
        f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    )
    docker.chmod(0o755)
    done = subprocess.run(
        [DEPLOY / script, "--seed", "1"],
        env={**VARIABLES, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = json.loads(done.stdout)
    image = next(n for n, word in enumerate(words) if word.startswith("gemma4kv/"))
    assert words[-2:] == ["--seed", "1"], "further arguments go to vLLM"
    return words[:image], words[image + 1 :]


def documents(name: str) -> dict[str, dict]:
    """The documents of a Kubernetes file, by kind; of services, the last one."""
    return {doc["kind"]: doc for doc in yaml.safe_load_all((DEPLOY / name).read_text())}


def size(text: str) -> int:
    number, unit = text.rstrip("Gig"), text[-2:]
    assert unit[0] in "G0123456789" or unit.endswith("g"), text
    return int(number) * GIB


def pod(name: str, kind: str) -> dict:
    return documents(name)[kind]["spec"]["template"]["spec"]


def from_docker(script, folder):
    options, arguments = docker_run(script, folder)
    value = dict(itertools.pairwise(options))
    assert value["--memory"] == value["--memory-swap"]
    assert value["--ulimit"] == "memlock=-1"
    return value["--memory"], value["--shm-size"], arguments


def from_compose(folder):
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["vllm"]
    assert service["mem_limit"] == service["memswap_limit"]
    assert service["ulimits"] == {"memlock": -1}
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert len(devices[0]["device_ids"]) == 2
    return service["mem_limit"], service["shm_size"], service["command"]


def from_kubernetes(name, kind):
    spec = pod(name, kind)
    (container,) = spec["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["memory"] == requests["memory"]
    assert limits["nvidia.com/gpu"] == requests["nvidia.com/gpu"] == "2"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volume = next(v for v in spec["volumes"] if v["name"] == mounts["/dev/shm"])
    assert volume["emptyDir"]["medium"] == "Memory"
    arguments = container["args"]
    if "command" in container:
        # What the shell makes of it on the second node.
        script = arguments[0].replace("exec vllm serve", "printf '%s\\n'")
        done = subprocess.run(
            [*container["command"], script],
            env={**os.environ, "NODE": "1"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        arguments = shlex.split(done.stdout)
    return limits["memory"], volume["emptyDir"]["sizeLimit"], arguments


EXAMPLES = {
    "docker-run.sh": (ONE_NODE, lambda folder: from_docker("docker-run.sh", folder)),
    "compose.yaml": (ONE_NODE, from_compose),
    "kubernetes.yaml": (
        ONE_NODE,
        lambda folder: from_kubernetes("kubernetes.yaml", "Deployment"),
    ),
    "multi-node.sh": (TWO_NODES, lambda folder: from_docker("multi-node.sh", folder)),
    "kubernetes-multi-node.yaml": (
        TWO_NODES,
        lambda folder: from_kubernetes("kubernetes-multi-node.yaml", "StatefulSet"),
    ),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_sizes_are_those_of_the_plan(example, tmp_path):
    question, read = EXAMPLES[example]
    planned = plan(question)
    memory, shared_memory, arguments = read(tmp_path)
    assert size(memory) == planned.memory_limit
    # The examples are for both pins; the pool of one is in shared memory.
    assert size(shared_memory) == question.offloading_size * GIB + SHARED_MEMORY_RESERVE
    assert size(shared_memory) >= planned.shared_memory
    words = {word for argument in arguments for word in argument.split("=")}
    assert set(planned.arguments) <= words


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_pin_has_the_flags(example, tmp_path):
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # v0.19.1
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    question, read = EXAMPLES[example]
    arguments = [word for word in read(tmp_path)[2] if not word.startswith("${")]
    if "google/gemma-4-31B-it" in arguments:
        arguments.remove("google/gemma-4-31B-it")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert parsed.kv_offloading_size == question.offloading_size
    assert parsed.tensor_parallel_size == question.tensor_parallel
    assert parsed.pipeline_parallel_size == question.pipeline_parallel
    assert parsed.nnodes == question.nodes
    assert parsed.headless == (question.nodes > 1)
    assert parsed.node_rank == question.nodes - 1


def test_everything_calls_the_server_by_its_name_and_port():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    prometheus = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert "8000:8000" in compose["vllm"]["ports"]
    for service in compose.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
    documents_of_one = documents("kubernetes.yaml")
    labels = documents_of_one["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert documents_of_one["Service"]["spec"]["selector"] == labels
    (container,) = pod("kubernetes.yaml", "Deployment")["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
