"""The patched wheel serves a Gemma 4 with KV offloading asked for, on this machine's CPU."""

import json
import re

import pytest
from engines import Server, offloading

CPU_BYTES = 96 << 20
SECRET = "pa55word-90210731"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def server(checkpoint, ledger, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    hostility = {"delay": (0, 4), "ledger": str(ledger)}
    kv_transfer = offloading(CPU_BYTES, storage_password=SECRET, hostility=hostility)
    model = checkpoint("gemma4-31b")
    with Server(model, log, kv_transfer=kv_transfer, served_model_name="gemma") as server:
        yield server


@pytest.fixture(scope="module")
def start_up_line(server) -> str:
    lines = [line for line in server.log.splitlines() if "Initializing a V1 LLM engine" in line]
    assert len(lines) == 1
    return lines[0]


def complete(server: Server, prompt: str) -> dict:
    body = {
        "model": "gemma",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    status, text = server.request("/v1/completions", body)
    assert status == 200, text
    return json.loads(text)


def test_same_request_gets_same_answer(server):
    prompt = "A server with a second tier for its KV cache: " * 4
    first, second = complete(server, prompt), complete(server, prompt)
    tokens = first["choices"][0]["token_ids"]
    assert len(tokens) == 16
    assert len(set(tokens)) > 4, "random weights should not repeat themselves like that"
    assert second["choices"][0]["token_ids"] == tokens
    assert first["usage"]["prompt_tokens"] == 1 + len(prompt)  # <bos> and a token a byte


def test_reloaded_answer_is_the_same(server, ledger):
    from host_memory_spec import Ledger

    prompt = "What leaves the GPU comes back from host memory: " * 3
    first = complete(server, prompt)
    complete(server, "And in the meantime, something else.")
    status, text = server.request("/reset_prefix_cache", {})
    assert status == 200, text
    again = complete(server, prompt)
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    entries = Ledger.read(ledger)
    assert sum(entry["tokens"] for entry in entries if entry["kind"] == "hit") >= 96
    assert not [entry for entry in entries if entry["kind"] == "problem"]


def test_another_request_gets_another_answer(server):
    first, second = (complete(server, prompt) for prompt in ("Vienna", "Berlin"))
    assert first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]


def test_unknown_model_is_refused(server):
    status, text = server.request("/v1/completions", {"model": "gemini", "prompt": "A"})
    assert (status, "gemini" in text) == (404, True)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("kv_connector", "'OffloadingConnector'"),
        ("kv_role", "'kv_both'"),
        ("cpu_bytes_to_use", str(CPU_BYTES)),
        ("spec_name", "'HostMemorySpec'"),
        ("kv_offloading_size", "None"),
        ("enable_hybrid_kv_cache_manager", "(True|False)"),
    ],
)
def test_start_up_line_shows(start_up_line, setting, value):
    assert re.search(rf"\b{setting}'?[=:] ?{value}[,)}}]", start_up_line), start_up_line


def test_start_up_line_keeps_secrets(start_up_line):
    assert "storage_password" in start_up_line, "that it was set is no secret"
    assert SECRET not in start_up_line
