"""The live check, against small servers that speak as vLLM does.

They keep prompts as vLLM would: in a GPU's cache and, with offloading, in host memory, both of
so many tokens. `tests/image` has it look at a real vLLM.
"""

import http.server
import json
import threading
from collections import OrderedDict

import pytest

from scripts import verify_server

PATCHED, STOCK = "0.19.1+gemma4kv.1", "0.19.1"
TOKENS_PER_CHARACTER = 0.25
KEYS = 'engine="0",model_name="gemma"'


class Cache(OrderedDict):
    """Prompts and their tokens; the least recently used one goes first."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def put(self, prompt, tokens):
        self[prompt] = tokens
        self.move_to_end(prompt)
        while sum(self.values()) > self.size:
            self.popitem(last=False)


class Vllm(http.server.ThreadingHTTPServer):
    """What the check sees of a server."""

    daemon_threads = True

    def __init__(self, version=PATCHED, offloading=True, gpu=20_000, host=200_000, **faults):
        super().__init__(("127.0.0.1", 0), Handler)
        self.version, self.offloading = version, offloading
        self.gpu, self.host = Cache(gpu), Cache(host if offloading else 0)
        self.faults = faults
        self.requests = self.late = 0
        self.dead = False
        self.counters = dict.fromkeys(["computed", "gpu", "host", "stored", "loaded"], 0)

    def answer(self, prompt):
        tokens = int(len(prompt) * TOKENS_PER_CHARACTER)
        source = "gpu" if prompt in self.gpu else "host" if prompt in self.host else "computed"
        if source == "computed" and self.offloading and not self.faults.get("stores_nothing"):
            self.counters["stored"] += 1000 * tokens
        self.counters["loaded"] += self.late
        self.late = 0
        if source == "host":
            # vLLM reports a load with the steps that follow
            self.late = 1000 * tokens
        self.counters[source] += tokens
        self.gpu.put(prompt, tokens)
        if not self.faults.get("stores_nothing"):
            self.host.put(prompt, tokens)
        start = sum(map(ord, prompt)) % 1000
        if source == "host" and self.faults.get("restores_wrong"):
            start += 1
        if self.faults.get("never_the_same"):
            start += self.requests
        return tokens, [start + n for n in range(verify_server.ANSWER_TOKENS)]

    def metrics(self):
        count = self.counters
        lines = [
            "# TYPE vllm:prompt_tokens_by_source counter",
            *(
                f'vllm:prompt_tokens_by_source_total{{{KEYS},source="{name}"}} {count[key]}'
                for name, key in (
                    ("local_compute", "computed"),
                    ("local_cache_hit", "gpu"),
                    ("external_kv_transfer", "host"),
                )
            ),
            (
                'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",'
                f'engine="0",kv_cache_size_tokens="{self.faults.get("says")}",'
                f'kv_offloading_size="None",num_gpu_blocks="{self.gpu.size // 16}"}} 1.0'
            ),
        ]
        if self.offloading:
            lines.append("# TYPE vllm:kv_offload_total_bytes counter")
            for way, key in (("GPU_to_CPU", "stored"), ("CPU_to_GPU", "loaded")):
                sample = f'vllm:kv_offload_total_bytes_total{{{KEYS},transfer_type="{way}"}}'
                lines.append(f"{sample} {count[key]}")
        return "\n".join(lines) + "\n"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def send(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        server = self.server
        if server.dead:
            return self.close_connection
        model = {"id": "gemma", "max_model_len": 8192}
        pages = {
            "/v1/models": json.dumps({"data": [model]}),
            "/version": json.dumps({"version": server.version}),
            "/metrics": server.metrics(),
            "/health": "",
        }
        if self.headers.get("Authorization") != server.faults.get("key"):
            return self.send(b"{}", 401)
        found = pages.get(self.path)
        return self.send((found or "").encode(), 200 if found is not None else 404)

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests += 1
        if server.requests == server.faults.get("dies_at"):
            server.dead = True
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices"')
            return
        if server.requests == server.faults.get("fails_at"):
            error = {"message": "EngineCore encountered an issue.", "code": 500}
            return self.send(f"data: {json.dumps({'error': error})}\n\n".encode())
        tokens, answer = server.answer(body["prompt"])
        events = [{"choices": [{"text": "", "token_ids": answer[: body["max_tokens"]]}]}]
        events.append({"choices": [], "usage": {"prompt_tokens": tokens}})
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.send("".join([*lines, "data: [DONE]\n\n"]).encode())


@pytest.fixture
def check(capsys):
    """A function that has a server checked; its report."""
    started = []

    def of(*options, **server):
        vllm = Vllm(**server)
        started.append(vllm)
        threading.Thread(target=vllm.serve_forever, args=[0.02], daemon=True).start()
        url = f"http://127.0.0.1:{vllm.server_port}"
        status = verify_server.main(["--url", url, "--json", "--patience=5", *options])
        report = json.loads(capsys.readouterr().out)
        assert report["exit_status"] == status
        report["requests"] = vllm.requests
        return report

    yield of
    for vllm in started:
        vllm.shutdown()
        vllm.server_close()


def test_works(check):
    report = check()
    assert report["verdict"] == "works"
    measured = report["measured"]
    assert measured["tokens_from_host"] == measured["prompt_tokens"] > 4000
    assert measured["bytes_loaded"] == 1000 * measured["prompt_tokens"]
    assert measured["answers_agree"]


def test_the_load_is_as_said(check, capsys):
    report = check()
    load = report["load"]
    # one request more makes vLLM report the load
    assert load["requests"] == report["requests"] - 1
    assert load["gpu_cache_tokens"] <= load["to_push_out"] < load["tokens"] < 60_000


@pytest.mark.parametrize(
    ("server", "verdict", "advice"),
    [
        ({"version": STOCK}, "unpatched", "offloading is on"),
        ({"version": STOCK, "offloading": False}, "unpatched", "Install them"),
        ({"offloading": False}, "off", "--kv-offloading-size"),
        ({"host": 15_000}, "too-small", "host memory holds less than the GPU does"),
        ({"stores_nothing": True}, "broken", "not stored in host memory"),
        ({"restores_wrong": True}, "broken", "another one than before"),
        ({"dies_at": 1}, "died", "stopped answering after 0 requests"),
        ({"dies_at": 5}, "died", "stopped answering after 4 requests"),
        ({"fails_at": 5}, "unclear", "a request failed: EngineCore encountered an issue."),
        ({"key": "Bearer x"}, "no-server", "--api-key if it wants one"),
    ],
)
def test_verdicts(check, server, verdict, advice):
    report = check(**server)
    assert report["verdict"] == verdict
    assert advice in "\n".join(report["text"])


def test_no_load_where_it_could_do_harm(check):
    assert check(version=STOCK)["requests"] == 0
    assert check("--load-unpatched", version=STOCK)["verdict"] == "works"


def test_a_server_that_never_repeats_itself(check):
    report = check(never_the_same=True)
    assert report["verdict"] == "works"
    assert "they prove nothing" in "\n".join(report["text"])


def test_more_than_the_user_allows(check):
    report = check("--max-tokens=1000")
    assert report["verdict"] == "unclear"
    assert report["requests"] == 3, "the pushing has not begun"


def test_a_cache_larger_than_it_seemed(check):
    report = check(says=1000)
    assert report["verdict"] == "works"
    assert report["load"]["gpu_cache_tokens"] == 20_000


def test_a_key(check):
    assert check("--api-key=x", key="Bearer x")["verdict"] == "works"


def test_another_model(check):
    assert check("--model=gemma")["verdict"] == "works"
    report = check("--model=qwen")
    assert "it has gemma" in report["text"][0]


def test_not_vllm(capsys):
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert verify_server.main(["--url", url, "--quiet"]) == 7
        server.shutdown()
    assert "is not a vLLM server: it has no metrics of vLLM" in capsys.readouterr().out


def test_nothing_there(capsys, tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "INFO starting\n"
        "pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, unknown key 'num_cpu_blocks'. [type=value_error, input_value=...]\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    assert verify_server.main(["--url", url, "--quiet", "--log", str(log)]) == 7
    output = capsys.readouterr().out
    assert output.startswith("NO-SERVER\n")
    assert output.endswith("why it does not run: unknown key 'num_cpu_blocks'.\n")


def test_memory_is_read_from_metrics_or_log():
    def of(text, log=""):
        metrics = verify_server.Metrics(text)
        (cache,) = metrics.info("vllm:cache_config_info") or [{}]
        return verify_server.host_memory(metrics, cache, log)

    sizes = 'cpu_kv_cache_size_bytes="5",cpu_kv_cache_size_tokens="7"'
    assert of(f"vllm:kv_offload_config_info{{{sizes}}} 1") == {"bytes": 5, "tokens": 7}
    assert of('vllm:cache_config_info{kv_offloading_size="2.0"} 1') == {"bytes": 2 << 30}
    line = (
        "CPU KV cache pool: allocated 120.0 GiB of 120.0 GiB asked for with cpu_bytes_to_use, "
        "as 49,152 blocks of 2.5 MiB on 1 worker(s). It holds 1,198,372 tokens in requests of"
    )
    assert of("", line) == {"bytes": 120 << 30, "tokens": 1198372}
    assert of("") == {}
