"""Does KV-cache offloading work on a running vLLM server? Ask it, with a bounded load.

    python -m scripts.verify_server --url http://127.0.0.1:8000

One long prompt is sent, and sent again from the GPU's cache; then others push it out of that
cache, one at a time, and it is sent once more. Where the third answer came from is read from
the server's metrics. How many tokens this takes is said before they are sent.

Nothing but Python's standard library is needed: the file can be copied to where it is used.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

LABEL = "gemma4kv"  # in the version of every vLLM with the series
# Exit statuses; 2 is argparse's, for options that make no sense.
VERDICTS = {
    "works": 0, "broken": 1, "off": 3, "unpatched": 4, "too-small": 5, "unclear": 6,
    "no-server": 7, "died": 8,
}  # fmt: skip
ANSWER_TOKENS = 16
GIB = 1 << 30


class Ended(Exception):
    """There is nothing more to find out: the verdict, and why."""

    def __init__(self, verdict: str, *lines: str):
        super().__init__(verdict)
        self.verdict, self.lines = verdict, lines


class NoAnswer(Exception):
    """The server cannot be reached, or breaks off."""


@dataclass
class Asked:
    """One request: what came back, and how soon."""

    prompt_tokens: int
    answer: list
    first_token_seconds: float
    sources: dict[str, float] = field(default_factory=dict)
    loaded_bytes: float = 0


@dataclass
class Report:
    url: str
    verdict: str = ""
    exit_status: int = 0
    text: list[str] = field(default_factory=list)
    server: dict = field(default_factory=dict)
    offloading: dict = field(default_factory=dict)
    load: dict = field(default_factory=dict)
    measured: dict = field(default_factory=dict)

    def end(self, verdict: str, *lines: str) -> None:
        self.verdict, self.exit_status = verdict, VERDICTS[verdict]
        self.text += lines


class Metrics:
    """The samples of a Prometheus page."""

    def __init__(self, text: str):
        self.families = set(re.findall(r"^# TYPE (\S+)", text, re.M))
        self._samples: list[tuple[str, dict[str, str], float]] = []
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.M):
            pairs = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))
            with contextlib.suppress(ValueError):
                self._samples.append((name, pairs, float(value)))

    @property
    def of_vllm(self) -> bool:
        return any(name.startswith("vllm:") for name in self.families)

    @property
    def offloading(self) -> bool:
        """Whether an OffloadingConnector counts here, whatever it was asked for with."""
        return any(name.startswith("vllm:kv_offload_") for name in self.families)

    def total(self, name: str, **labels: str) -> float:
        """Over all engines."""
        return sum(
            value
            for found, pairs, value in self._samples
            if found in (name, f"{name}_total")
            and all(pairs.get(key, "").lower() == wanted for key, wanted in labels.items())
        )

    def info(self, name: str) -> list[dict[str, str]]:
        return [pairs for found, pairs, _ in self._samples if found == name]

    def moved(self, load: bool) -> float:
        """Bytes between GPU and host memory."""
        name = f"vllm:kv_offload_{'load' if load else 'store'}_bytes"
        if found := self.total(name):
            return found
        way = "cpu_to_gpu" if load else "gpu_to_cpu"
        return self.total("vllm:kv_offload_total_bytes", transfer_type=way)

    def sources(self) -> dict[str, float]:
        """Prompt tokens so far, by where their KV cache came from."""
        return {
            name: self.total("vllm:prompt_tokens_by_source", source=source)
            for name, source in (
                ("computed", "local_compute"),
                ("gpu", "local_cache_hit"),
                ("host", "external_kv_transfer"),
            )
        }


class Server:
    """The HTTP interface of vLLM."""

    def __init__(self, url: str, metrics_url: str | None, key: str | None, patience: float):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.metrics_url = metrics_url or f"{self.url}/metrics"
        self.patience = patience
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        host = urllib.parse.urlsplit(self.url).hostname or ""
        local = host == "localhost" or host.startswith("127.") or host == "::1"
        # what is on this machine is not reached by a proxy
        handlers = [urllib.request.ProxyHandler({})] if local else []
        self._opener = urllib.request.build_opener(*handlers)

    def get(self, path: str) -> tuple[int, str]:
        url = path if "://" in path else self.url + path
        try:
            with self._open(url) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            return error.code, ""

    def json(self, path: str) -> dict | None:
        status, text = self.get(path)
        try:
            found = json.loads(text) if status == 200 else None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else None

    def metrics(self) -> Metrics:
        status, text = self.get(self.metrics_url)
        return Metrics(text if status == 200 else "")

    def alive(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except NoAnswer:
            return False

    def use_engine(self, number: int) -> None:
        """With data parallelism each engine has a cache of its own."""
        self._headers["X-data-parallel-rank"] = str(number)

    def complete(self, model: str, prompt: str, tokens: int) -> Asked:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, first, answer, usage = time.monotonic(), None, [], {}
        try:
            with self._open(f"{self.url}/v1/completions", body) as lines:
                for event in _events(lines):
                    if "error" in event:
                        raise NoAnswer(_message(event["error"]))
                    for choice in event.get("choices", []):
                        first = first or time.monotonic()
                        answer += choice.get("token_ids") or [choice.get("text", "")]
                    usage = event.get("usage") or usage
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            if error.code >= 500:
                raise NoAnswer(f"HTTP {error.code}: {text}") from None
            raise Ended(
                "unclear",
                f"The server refuses a request of this check: HTTP {error.code} {text}",
            ) from None
        if first is None or "prompt_tokens" not in usage:
            raise NoAnswer("an answer broke off")
        return Asked(usage["prompt_tokens"], answer, first - start)

    def _open(self, url: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=self._headers)
        try:
            return _Guarded(self._opener.open(request, timeout=self.patience))
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(getattr(error, "reason", error))) from None


class _Guarded:
    """An answer whose reading fails as its opening does."""

    def __init__(self, answer):
        self._answer = answer
        self.status = answer.status

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self._answer.close()

    def read(self) -> bytes:
        try:
            return self._answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(error)) from None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._answer
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(str(error)) from None


def _events(lines: _Guarded) -> Iterator[dict]:
    for line in lines:
        content = line.decode(errors="replace").removeprefix("data:").strip()
        if line.startswith(b"data:") and content != "[DONE]":
            try:
                yield json.loads(content)
            except ValueError:
                raise NoAnswer("an answer broke off") from None


class Check:
    """The check itself, filling in a report."""

    def __init__(self, server: Server, options: argparse.Namespace, report: Report):
        self.server, self.options, self.report = server, options, report
        self.log = read_log(options.log)
        self.sent_tokens = self.sent_requests = 0

    def run(self) -> None:
        metrics = self._meet()
        self._read_settings(metrics)
        self._load(metrics)

    # --- what the server says about itself ---

    def _meet(self) -> Metrics:
        self._progress(f"asking {self.server.url} what it is")
        try:
            models = self.server.json("/v1/models")
            version = self.server.json("/version") or {}
            metrics = self.server.metrics()
        except NoAnswer as error:
            refusal = why_it_ended(self.log)
            raise Ended(
                "no-server",
                f"Nothing answers at {self.server.url}: {error}.",
                f"Its log says why it does not run: {refusal}"
                if refusal
                else "If it was started, read the end of its log, or name the log with --log.",
            ) from None
        if not metrics.of_vllm or not models or "version" not in version:
            lacking = (
                "metrics of vLLM" if not metrics.of_vllm else "vLLM's /version and /v1/models"
            )
            raise Ended(
                "no-server",
                f"What answers at {self.server.url} is not a vLLM server: it has no {lacking}.",
                "Give the address of the server itself; --metrics-url if its metrics are "
                "elsewhere, --api-key if it wants one.",
            )
        names = {model["id"]: model for model in models.get("data", [])}
        name = self.options.model or next(
            (n for n, m in names.items() if not m.get("parent")), ""
        )
        if name not in names:
            raise Ended(
                "unclear", f"The server has no model {name!r}; it has {', '.join(names)}."
            )
        self.model = name
        self.report.server = {
            "version": version["version"],
            "model": name,
            "max_model_len": names[name].get("max_model_len"),
        }
        return metrics

    def _read_settings(self, metrics: Metrics) -> None:
        version = self.report.server["version"]
        caches = metrics.info("vllm:cache_config_info")
        cache = caches[0] if caches else {}
        self.report.offloading = {
            "on": metrics.offloading,
            "patched": LABEL in version,
            **host_memory(metrics, cache, self.log),
        }
        if len(caches) > 1:
            self.server.use_engine(0)
        on = "on" if metrics.offloading else "off"
        if LABEL not in version and not self.options.load_unpatched:
            raise Ended(
                "unpatched",
                f"This is vLLM {version} as published, without patches; offloading is {on}.",
                "Install them (README.md), or use an image that has them, and start the server "
                "again.",
                "No load was sent: the release as published can crash under it.",
            )
        if not metrics.offloading:
            raise Ended(
                "off",
                f"vLLM {version} has the patches, but KV offloading is off.",
                "Start it with `--kv-offloading-size GIB`, or with `--kv-transfer-config "
                '\'{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
                '"kv_connector_extra_config": {"cpu_bytes_to_use": "120GiB"}}\'`. The line '
                "`Initializing a V1 LLM engine` of its log shows what arrived.",
            )
        if cache.get("enable_prefix_caching") == "False":
            raise Ended(
                "off",
                "Prefix caching is off, and without it nothing is looked up in host memory.",
                "Start the server without `--no-enable-prefix-caching`.",
            )
        self.cache = cache

    # --- the load ---

    def _load(self, metrics: Metrics) -> None:
        words = random.Random()
        limit = self.report.server["max_model_len"] or 4096
        want = min(self.options.prompt_tokens, limit * 3 // 4)
        self._progress("a short prompt, to see how its words are counted")
        lines = 8
        trial = self._ask(_text(words, lines), 1)
        per_line = trial.prompt_tokens / lines
        long = max(lines, int(want / per_line))

        self._progress(f"a prompt of about {int(long * per_line):,} tokens, new to the server")
        text = _text(words, long)
        with self._watch_usage() as usage:
            cold = self._ask(text, ANSWER_TOKENS)
        self._progress("the same again, which the GPU's cache should hold")
        hot = self._ask(text, ANSWER_TOKENS)
        stored = self.server.metrics().moved(load=False) - metrics.moved(load=False)

        again, pushed = None, 0
        for capacity in self._gpu_tokens(cold.prompt_tokens, usage):
            pushed = self._push_out(words, long, cold.prompt_tokens, capacity)
            self._progress("the first prompt once more")
            again = self._ask(text, ANSWER_TOKENS)
            if again.sources["gpu"] < 0.5 * again.prompt_tokens:
                break
        self._judge(cold, hot, again, stored, pushed)

    def _push_out(self, words: random.Random, lines: int, each: int, capacity: int) -> int:
        """Fill the GPU's cache with other prompts; the tokens that were sent."""
        requests = math.ceil(1.25 * capacity / each)
        tokens = requests * each
        self.report.load = {"gpu_cache_tokens": capacity, "to_push_out": tokens}
        if self.sent_tokens + tokens > self.options.max_tokens:
            raise Ended(
                "unclear",
                f"To push a prompt out of the GPU's cache takes {tokens:,} tokens, more than "
                f"the {self.options.max_tokens:,} that --max-tokens allows.",
            )
        self._progress(
            f"{requests} other prompts, {tokens:,} tokens in all, one at a time, to push it out"
        )
        for number in range(requests):
            self._ask(_text(words, lines), 1)
            if number % max(1, requests // 10) == 0:
                self._progress(f"  {number + 1} of {requests}")
        return tokens

    def _ask(self, text: str, tokens: int) -> Asked:
        before = self.server.metrics()
        try:
            asked = self.server.complete(self.model, text, tokens)
            after = self.server.metrics()
            until = time.monotonic() + 5
            while _sources(before, after)["host"] and time.monotonic() < until:
                if after.moved(True) > before.moved(True):
                    break
                # reported with the steps that follow: let there be one
                self.server.complete(self.model, _text(random.Random(), 2), 2)
                after = self.server.metrics()
        except NoAnswer as error:
            raise self._broken_off(error) from None
        self.sent_requests += 1
        self.sent_tokens += asked.prompt_tokens
        asked.sources = _sources(before, after)
        asked.loaded_bytes = after.moved(True) - before.moved(True)
        return asked

    def _broken_off(self, error: NoAnswer) -> Ended:
        if self.server.alive():
            return Ended("unclear", f"The server lives, but a request failed: {error}.")
        reason = why_it_ended(read_log(self.options.log))
        return Ended(
            "died",
            f"The server stopped answering after {self.sent_requests} requests of this check: "
            f"{error}.",
            f"Its log ends with: {reason}"
            if reason
            else "Read the end of its log: if offloading is to blame, it names the transfer.",
        )

    @contextlib.contextmanager
    def _watch_usage(self) -> Iterator[list[float]]:
        """How full the GPU's cache is, beyond what it was, while requests run."""
        name = "vllm:kv_cache_usage_perc"
        start = self.server.metrics().total(name)
        found: list[float] = []
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.1):
                with contextlib.suppress(NoAnswer):
                    found.append(self.server.metrics().total(name) - start)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            done.set()
            thread.join()

    def _gpu_tokens(self, prompt_tokens: int, usage: list[float]) -> list[int]:
        """Tokens that the GPU's cache holds: the likely number, and the largest possible."""
        said = self.cache.get("kv_cache_size_tokens", "None")
        blocks, size = (self.cache.get(key, "") for key in ("num_gpu_blocks", "block_size"))
        found = []
        if said.isdigit():
            found.append(int(said))
        elif in_use := [fraction for fraction in usage if fraction > 0]:
            # the last: before the answer, windows of the whole prompt may have been held
            found.append(int(prompt_tokens / in_use[-1]))
        if blocks.isdigit() and size.isdigit():
            most = int(blocks) * int(size)
            found = [*(tokens for tokens in found if tokens < most), most]
        if not found:
            raise Ended("unclear", "The metrics do not say how large the GPU's cache is.")
        return found

    # --- the verdict ---

    def _judge(self, cold: Asked, hot: Asked, again: Asked, stored: float, pushed: int) -> None:
        offloading, tokens = self.report.offloading, again.prompt_tokens
        # v0.33.0 says it when it has something to do
        offloading |= host_memory(self.server.metrics(), self.cache, self.log)
        restored, in_gpu = again.sources["host"], again.sources["gpu"]
        agree = again.answer in (cold.answer, hot.answer)
        steady = cold.answer == hot.answer
        self.report.load |= {"requests": self.sent_requests, "tokens": self.sent_tokens}
        self.report.measured = {
            "prompt_tokens": tokens,
            "tokens_from_host": restored,
            "tokens_from_gpu": in_gpu,
            "bytes_stored": stored,
            "bytes_loaded": again.loaded_bytes,
            "first_token_seconds": {
                "cold": round(cold.first_token_seconds, 4),
                "gpu_cache": round(hot.first_token_seconds, 4),
                "restored": round(again.first_token_seconds, 4),
            },
            "answers_agree": agree,
            "answers_steady": steady,
        }
        times = (
            f"Time to first token: {cold.first_token_seconds:.3f} s cold, "
            f"{hot.first_token_seconds:.3f} s from the GPU's cache, "
            f"{again.first_token_seconds:.3f} s the last time."
        )
        came = (
            f"Of {tokens:,} tokens, {restored:,.0f} came from host memory "
            f"({again.loaded_bytes / (1 << 20):,.1f} MiB loaded), {in_gpu:,.0f} from the GPU's "
            "cache."
        )
        memory = f"Offloading is on, {describe_memory(offloading)}."
        if not agree and steady and restored:
            raise Ended(
                "broken", memory, came,
                "The answer after the restore is another one than before, twice the same. Stop "
                "offloading on this server, and report its version, settings and log.",
            )  # fmt: skip
        if restored >= 0.75 * tokens:
            agreement = "The answers agree."
            if not agree:
                agreement = (
                    "The answers differ, but they did so before anything was restored: this "
                    "server does not repeat itself, so they prove nothing."
                )
            raise Ended("works", memory, came, times, agreement)
        if in_gpu + restored >= 0.75 * tokens:
            raise Ended(
                "unclear", memory, came,
                f"{pushed:,} tokens did not push the prompt out of the GPU's cache. Run this "
                "again, best while nobody else uses the server.",
            )  # fmt: skip
        held = offloading.get("tokens")
        if stored and not (held and held > 2 * pushed):
            raise Ended(
                "too-small", memory, came, times,
                f"The prompt was stored ({stored / (1 << 20):,.1f} MiB), but was gone after "
                f"{pushed:,} other tokens, which is what it takes to fill the GPU's cache: "
                "host memory holds less than the GPU does. Give it more, at least twice as "
                "much as the GPU's KV cache has.",
            )  # fmt: skip
        raise Ended(
            "broken", memory, came, times,
            "The prompt was not stored in host memory." if not stored
            else "The prompt was stored, there is room for it, and it was not found again.",
            "Look for warnings about KV offloading in the server's log.",
        )  # fmt: skip

    def _progress(self, text: str) -> None:
        if not self.options.quiet:
            print(f"... {text}", file=sys.stderr, flush=True)


def _message(error: object) -> str:
    """The sentence in an error of an OpenAI-compatible server."""
    said = error.get("message") if isinstance(error, dict) else None
    return str(said or error).rstrip(".")


def _sources(before: Metrics, after: Metrics) -> dict[str, float]:
    was = before.sources()
    return {name: value - was[name] for name, value in after.sources().items()}


def _text(words: random.Random, lines: int) -> str:
    """Lines that no cache has seen, and a question about one of them."""
    codes = [words.randrange(100000, 1000000) for _ in range(lines)]
    entries = [f"Entry {n}: the code is {code}.\n" for n, code in enumerate(codes)]
    return "".join(entries) + f"Entry {lines // 2}: the code is"


def host_memory(metrics: Metrics, cache: dict[str, str], log: str) -> dict:
    """Bytes and tokens of the host's pool, as far as the server tells."""
    for info in metrics.info("vllm:kv_offload_config_info"):
        size, tokens = (
            info.get(f"cpu_kv_cache_size_{unit}", "") for unit in ("bytes", "tokens")
        )
        if size.isdigit():
            return {"bytes": int(size), "tokens": int(tokens) if tokens.isdigit() else None}
    line = re.findall(
        r"CPU KV cache pool: allocated ([\d.,]+) GiB .* as ([\d,]+) \w+ of ([\d.]+) MiB.* "
        r"holds ([\d,]+) tokens", log,
    )  # fmt: skip
    if line:
        gib, blocks, mib, tokens = (float(number.replace(",", "")) for number in line[-1])
        return {"bytes": int(gib * GIB or blocks * mib * (1 << 20)), "tokens": int(tokens)}
    with contextlib.suppress(ValueError):
        return {"bytes": int(float(cache.get("kv_offloading_size", "")) * GIB)}
    return {}


def describe_memory(offloading: dict) -> str:
    if not (size := offloading.get("bytes")):
        return "how much host memory it took stands in the server's log (give it with --log)"
    tokens = offloading.get("tokens")
    amount = f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):,.1f} MiB"
    return f"with {amount} of host memory" + (f" for {tokens:,} tokens" if tokens else "")


def read_log(path: str | None) -> str:
    return Path(path).read_text(errors="replace") if path else ""


def why_it_ended(log: str) -> str | None:
    """The last error of a log that does not only point to another one."""
    # pydantic's says on the line after next what is wrong
    errors = re.findall(r"(?:^|\s)((?:\w+\.)*\w*Error: .*|Value error, .*)$", log, re.M)
    pointers = "[Ss]ee (root cause|stack trace)|validation errors? for"
    telling = [error for error in errors if not re.search(pointers, error)]
    if not telling:
        return None
    return re.sub(r" \[type=\w+, input_value=.*", "", telling[-1]).removeprefix("Value error, ")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    server = Server(options.url, options.metrics_url, options.api_key, options.patience)
    report = Report(server.url)
    try:
        Check(server, options, report).run()
    except Ended as ended:
        report.end(ended.verdict, *ended.lines)
    except NoAnswer as error:
        report.end("died", f"The server stopped answering: {error}.")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        print(f"{report.verdict.upper()}")
        print("\n".join(report.text))
    return report.exit_status


def _parser() -> argparse.ArgumentParser:
    codes = ", ".join(f"{status} {name}" for name, status in VERDICTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m scripts.verify_server",
        description=__doc__,
        epilog=f"Exit status: {codes}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    add("--metrics-url", help="of its metrics, if not URL/metrics")
    add("--model", help="default: the first that it serves")
    add("--api-key", default=os.environ.get("VLLM_API_KEY"), help="default: VLLM_API_KEY")
    add("--log", help="file with the server's log, for what only stands there")
    add("--prompt-tokens", type=int, default=8192, help="of the prompt (default: %(default)s)")
    add("--max-tokens", type=int, default=2_000_000,
        help="of all prompts together (default: %(default)s)")  # fmt: skip
    add("--patience", type=float, default=300, help="seconds to wait for an answer")
    add("--load-unpatched", action="store_true",
        help="send the load to a vLLM without the patches too; it may crash")  # fmt: skip
    add("--json", action="store_true", help="the report as JSON")
    add("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    sys.exit(main())
