"""Start vLLM: in this process, or as the server that a user starts."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The CPU attention of v0.33.0 wants blocks of a multiple of 32 tokens.
BLOCK_SIZE = 32
# float32, so that rounding does not depend on how a prompt is cut into chunks.
ENGINE_SETTINGS = {
    "block_size": BLOCK_SIZE,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "seed": 0,
}


def offloading(cpu_bytes_to_use: int, **extra_config: Any) -> dict:
    """Settings of the OffloadingConnector, with host memory in the place of CUDA's."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostMemorySpec",
            "spec_module_path": "host_memory_spec",
            "cpu_bytes_to_use": cpu_bytes_to_use,
            **extra_config,
        },
    }


def engine_arguments(model: Path, *, kv_transfer: dict | None = None, **settings: Any) -> dict:
    """Arguments of `LLM` and `EngineArgs`."""
    from vllm.config import KVTransferConfig

    if kv_transfer is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
    return {"model": str(model), "disable_log_stats": False, **(ENGINE_SETTINGS | settings)}


def engine_config(model: Path, **settings: Any):
    """What vLLM makes of these settings."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**engine_arguments(model, **settings)).create_engine_config()


def hybrid_manager_is_on(config) -> bool:
    """Whether each KV cache group has blocks of its own."""
    return not config.scheduler_config.disable_hybrid_kv_cache_manager


@contextmanager
def engine(model: Path, *, processes: bool = False, **settings: Any) -> Iterator:
    """An `LLM`, whose scheduler and worker live in this process or in others."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm = LLM(**engine_arguments(model, **settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        _free_caches(llm)


def _free_caches(llm) -> None:
    """Give the KV caches' memory back, which PyTorch keeps although nobody uses it."""
    import torch

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        caches = getattr(layer, "kv_cache", ())
        for cache in [caches] if isinstance(caches, torch.Tensor) else caches:
            cache.untyped_storage().resize_(0)


def generate(llm, prompts: list[list[int]], tokens: int) -> list:
    """Greedy answers of that many tokens."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, greedy, use_tqdm=False)


def counter(llm, name: str) -> int:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


class Server:
    """`vllm serve` as a process group of its own, on a free port of this machine."""

    def __init__(self, model: Path, log: Path, *, kv_transfer: dict, **settings: Any):
        self._log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        for name, value in (ENGINE_SETTINGS | settings).items():
            option = "--" + name.replace("_", "-")
            command += [option] if value is True else [option, str(value)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=log.parent,
                env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},  # /reset_prefix_cache
            )

    def __enter__(self) -> "Server":
        try:
            self._wait_until_ready(seconds=240)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def request(self, path: str, body: dict | None = None) -> tuple[int, str]:
        """The status and the text of the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            raise AssertionError(self._complaint(f"no answer to {path}: {error}")) from error

    def stop(self) -> None:
        """End every process of the server."""
        for number, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            end = time.monotonic() + patience
            while self._signal(number):
                number = 0  # from now on only ask whether one is left
                if time.monotonic() > end:
                    break
                self._pause()
            else:
                return
        raise AssertionError(self._complaint("the server's processes do not end"))

    def _signal(self, number: int) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _pause(self) -> None:
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return
        time.sleep(0.05)  # ended: its children may need a moment more

    def _wait_until_ready(self, seconds: float) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with direct.open(f"http://127.0.0.1:{self._port}/health", timeout=5):
                    return
            except OSError:
                self._pause()
            if self._process.poll() is not None:
                status = self._process.returncode
                raise AssertionError(self._complaint(f"the server ended with {status}"))
        raise AssertionError(self._complaint(f"the server is not ready after {seconds} s"))

    def _complaint(self, what: str) -> str:
        tail = "\n".join(self.log.splitlines()[-60:])
        return f"{what}; the end of its log:\n{tail}"
