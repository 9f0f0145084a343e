"""The dashboard's queries, against what a real engine exports, asked by a real Prometheus."""

import json
import random
import re
import threading
from pathlib import Path

import environment
import prometheus
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

environment.make_importable(Path(__file__).parent)  # for the engine's own process

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deploy" / "monitoring" / "kv-offloading.json").read_text()
)
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    # A panel with data of one release only says which.
    if environment.RELEASE == "v0.19.1" or "v0.19.1 only" not in panel["description"]
    for target in panel["targets"]
}


def prompt(seed: int, length: int = 200) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(4, 260) for _ in range(length)]


@pytest.fixture(scope="module")
def app(checkpoint):
    """VLLM's own /metrics, after an engine has stored and loaded."""
    from engines import engine, generate, offloading
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    backend = {"spec_name": "TimedSpec", "spec_module_path": "timed_spec"}
    with engine(
        checkpoint("gemma4-31b"),
        processes=True,
        kv_transfer=offloading(64 << 20, **backend),
        num_gpu_blocks_override=256,
    ) as llm:
        for seed in (0, 1):
            generate(llm, [prompt(seed)], 8)
        assert llm.reset_prefix_cache(), "the GPU has not forgotten the first prompt"
        # Something runs already when it comes again: a step that only loads reports nothing.
        generate(llm, [prompt(2), prompt(0)], 64)
    app = FastAPI()
    attach_router(app)
    return app


@pytest.fixture(scope="module")
def exported(app):
    return TestClient(app).get("/metrics").text


@pytest.mark.parametrize("query", QUERIES)
def test_metrics_are_exported(query, exported):
    """Of alternatives, one. Counters of v0.33.0 have no sample until there is one to count."""
    for part in QUERIES[query].removesuffix(" or vector(0)").split(" / "):
        names = re.findall(r"vllm:\w+", part)
        assert any(re.search(rf"^(# TYPE )?{name}[ {{]", exported, re.M) for name in names), (
            f"none of {names} is exported"
        )


def test_transfers_are_told_apart(exported):
    found = re.findall(
        r'^vllm:kv_offload_total_bytes_total{.*transfer_type="(\w+)"', exported, re.M
    )
    assert sorted(found) == ["CPU_to_GPU", "GPU_to_CPU"]
    hits = re.search(r"^vllm:external_prefix_cache_hits_total{.*} (.*)", exported, re.M)
    assert float(hits[1]) > 0


@pytest.fixture
def address(app):
    """Of a server with vLLM's /metrics."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        thread.join(0.05)
    host, port = server.servers[0].sockets[0].getsockname()
    yield f"{host}:{port}"
    server.should_exit = True
    thread.join()


def test_a_real_prometheus_answers_the_queries(address, tmp_path):
    program = prometheus.find()
    if program is None:
        pytest.skip("there is no prometheus, and no Debian package of it to be had")
    with prometheus.Prometheus(program, address, tmp_path) as asked:
        for title, query in QUERIES.items():
            found = asked.query(query.replace("$__rate_interval", "1m"))
            assert found, f"{title}: no series answers {query}"
