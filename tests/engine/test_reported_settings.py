"""The settings of the report, scaled down to the small Gemma 4 with the 31B's structure.

A server was given 120 GiB of host memory for Gemma 4 31B. It took next to none of it, did not
say what had arrived, and crashed when the scheduler used host blocks that the worker did not
have. Here MiB stand for GiB.
"""

import ctypes
import json
import logging
import mmap
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import BLOCK_SIZE, ENGINE_SETTINGS, counter, engine, generate

RELEASE = version("vllm").partition("+")[0]
MODEL = "gemma4-31b"
ASKED = 120 << 20
# One wish in its spellings: `kv_offloading_size`, and `cpu_bytes_to_use` of the other option.
SPELLINGS: dict[str, tuple[float | None, int | None]] = {
    "cpu_bytes_to_use": (None, ASKED),
    "kv_offloading_size": (ASKED / (1 << 30), None),
    "both": (ASKED / (1 << 30), ASKED),
}
BACKEND = {"spec_name": "CheckedSpec", "spec_module_path": __name__}
SMALL_CACHE = {"disable_hybrid_kv_cache_manager": True, "num_gpu_blocks_override": 40}
NEW_TOKENS = 16

reported_release = pytest.mark.skipif(
    RELEASE != "0.19.1", reason="the report, and the patches that mend this, are of v0.19.1"
)

if RELEASE == "0.19.1":
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

    class CheckedSpec(CPUOffloadingSpec):
        """One block of the only group in each host block, and each id checked."""

        blocks: tuple[int, ...] = ()  # host blocks that scheduler and worker count on
        bytes = 0  # what the worker allocated

        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords)
            CheckedSpec.blocks += (self.num_blocks,)

        def get_handlers(self, kv_caches):
            gpu = [
                cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
                for cache in kv_caches.tensors
            ]
            host = [tensor.new_zeros(self.num_blocks, tensor.shape[1]) for tensor in gpu]
            CheckedSpec.bytes = sum(tensor.nbytes for tensor in host)
            yield GPULoadStoreSpec, CPULoadStoreSpec, CheckedHandler(gpu, host)
            yield CPULoadStoreSpec, GPULoadStoreSpec, CheckedHandler(host, gpu)

    class CheckedHandler(OffloadingHandler):
        def __init__(self, source: list[torch.Tensor], target: list[torch.Tensor]):
            self.source, self.target = source, target
            self.finished: list[TransferResult] = []

        def transfer_async(self, job_id, spec) -> bool:
            sources, targets = (torch.from_numpy(side.block_ids) for side in spec)
            for ids, tensors in ((sources, self.source), (targets, self.target)):
                if not all(0 <= number < len(tensors[0]) for number in ids.tolist()):
                    raise IndexError(f"not all of {ids} are of {len(tensors[0])} blocks")
            for source, target in zip(self.source, self.target):
                target[targets] = source[sources]
            self.finished.append(TransferResult(job_id, True))
            return True

        def get_finished(self) -> list[TransferResult]:
            finished, self.finished = self.finished, []
            return finished

        def wait(self, job_ids) -> None:
            pass


def wish(name: str, **extra_config: Any) -> dict:
    """Engine settings that ask for offloading in one of the spellings."""
    size, cpu_bytes = SPELLINGS[name]
    if cpu_bytes is not None:
        extra_config["cpu_bytes_to_use"] = cpu_bytes
    return settings(size, extra_config)


def settings(size: float | None, extra_config: dict) -> dict:
    result: dict = {} if size is None else {"kv_offloading_size": size}
    if extra_config:
        result["kv_transfer"] = {"kv_connector_extra_config": extra_config}
        if size is None:
            result["kv_transfer"] |= {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
            }
    return result


def configure(model: Path, wanted: dict):
    """The configuration of an engine with these settings, without the engine."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    arguments = dict(ENGINE_SETTINGS | wanted)
    if (kv_transfer := arguments.pop("kv_transfer", None)) is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**kv_transfer)
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def outcome(config) -> dict:
    """What of a configuration decides on offloading."""
    kv_transfer = config.kv_transfer_config
    return {
        "kv_connector": kv_transfer.kv_connector,
        "kv_role": kv_transfer.kv_role,
        "extra_config": kv_transfer.kv_connector_extra_config,
        "without_hybrid_manager": config.scheduler_config.disable_hybrid_kv_cache_manager,
    }


def prompt(seed: int, length: int = 200) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(4, 260) for _ in range(length)]


def ask_evict_and_ask_again(llm) -> tuple[list[int], list[int], int]:
    """Both answers, and the tokens of the prompt that came from host memory."""
    (first,) = generate(llm, [prompt(0)], NEW_TOKENS)
    generate(llm, [prompt(seed) for seed in range(1, 11)], 1)
    before = counter(llm, "vllm:external_prefix_cache_hits")
    # A new prompt beside it: a step that only loads reports no statistics.
    again, _ = generate(llm, [prompt(0), prompt(99)], NEW_TOKENS)
    hits = counter(llm, "vllm:external_prefix_cache_hits") - before
    assert again.num_cached_tokens == hits
    return list(first.outputs[0].token_ids), list(again.outputs[0].token_ids), hits


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The messages of vLLM's log from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def only(messages: list[str], start: str) -> str:
    (message,) = [message for message in messages if message.startswith(start)]
    return message


def test_spellings_mean_the_same(checkpoint):
    configs = {name: configure(checkpoint(MODEL), wish(name)) for name in SPELLINGS}
    first, *others = map(outcome, configs.values())
    assert first["kv_connector"] == "OffloadingConnector"
    assert first["extra_config"] == {"cpu_bytes_to_use": ASKED}
    assert others == [first] * len(others)
    for name, config in configs.items():
        size, _ = SPELLINGS[name]
        # What the start-up line shows.
        assert f"kv_offloading_size={size}, " in str(config)
        assert re.search(rf"'cpu_bytes_to_use': {ASKED}\b", str(config))


@reported_release
def test_pool_and_reload_without_hybrid_manager(checkpoint, log):
    """Whatever the spelling: scheduler and worker agree, and what is reloaded is right."""
    lines, answers = [], []
    for name in ("cpu_bytes_to_use", "kv_offloading_size"):
        log.clear()
        CheckedSpec.blocks = ()
        with engine(checkpoint(MODEL), **wish(name, **BACKEND), **SMALL_CACHE) as llm:
            first, again, hits = ask_evict_and_ask_again(llm)

        assert "enable_hybrid_kv_cache_manager=False" in only(log, "Initializing a V1 LLM")
        blocks = set(CheckedSpec.blocks)
        assert len(CheckedSpec.blocks) > 1
        assert len(blocks) == 1, "scheduler and worker count differently"
        assert 0.99 * ASKED <= CheckedSpec.bytes <= ASKED
        line = only(log, "CPU KV cache pool")
        assert f"of 0.12 GiB asked for with {name}, as {blocks.pop()} blocks of" in line
        assert line.endswith("The hybrid KV cache manager is off.")
        lines.append(line.replace(name, "..."))

        assert len(set(first)) > NEW_TOKENS // 2
        assert again == first
        assert hits == len(prompt(0)) // BLOCK_SIZE * BLOCK_SIZE
        answers.append(first)
    assert lines[0] == lines[1]
    assert answers[0] == answers[1]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The specification of vLLM itself, and the clean-up after an engine that did not start."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.v1.kv_offload.cpu import spec

    monkeypatch.setattr(spec, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    yield spec
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()


def resident(tensor: torch.Tensor) -> int:
    """The bytes of a tensor for which the system has provided memory."""
    flags = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    start, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(start, length, flags) == 0
    return min(tensor.nbytes, sum(flag & 1 for flag in flags) * mmap.PAGESIZE)


@reported_release
def test_memory_is_really_taken(checkpoint, as_on_a_gpu, monkeypatch):
    """At start-up, by vLLM's own handlers."""
    taken: list[int] = []

    class Handlers(as_on_a_gpu.CpuGpuOffloadingHandlers):
        def __init__(self, **keywords: Any):
            super().__init__(**keywords)
            taken.extend(map(resident, self.gpu_to_cpu_handler.dst_tensors))

    monkeypatch.setattr(as_on_a_gpu, "CpuGpuOffloadingHandlers", Handlers)
    with engine(checkpoint(MODEL), **wish("kv_offloading_size"), **SMALL_CACHE):
        assert 0.99 * ASKED <= sum(taken) <= ASKED


@reported_release
def test_more_than_the_machine_has_is_refused(checkpoint, as_on_a_gpu, monkeypatch):
    """Before anything is allocated."""
    monkeypatch.delattr(as_on_a_gpu, "CpuGpuOffloadingHandlers")
    too_much = settings(None, {"cpu_bytes_to_use": "200TiB"})
    with pytest.raises(ValueError, match="CPU KV cache pool") as error:
        engine(checkpoint(MODEL), **too_much, **SMALL_CACHE).__enter__()
    figure = r"[\d.]+ GiB"
    assert re.search(
        rf"needs 204\d{{3}}\.\d+ GiB of host memory on .* at most {figure} can be taken there: "
        rf".* has {figure}, {figure} of them available, and {figure} are kept free",
        str(error.value),
    )


@reported_release
@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("num_cpu_blocks", "It is retired, use 'cpu_bytes_to_use' instead"),
        ("cpu_byte_to_use", "Did you mean 'cpu_bytes_to_use'?"),
        ("block_per_chunk", "Did you mean 'blocks_per_chunk'?"),
    ],
)
def test_a_key_that_nobody_reads_is_refused(checkpoint, key, advice):
    wanted = wish("cpu_bytes_to_use", **{key: 1000})
    with pytest.raises(ValueError, match=f"unknown key '{key}'") as error:
        configure(checkpoint(MODEL), wanted)
    assert advice in str(error.value)


def report(model: Path) -> None:
    """Print what the installed release makes of the settings."""
    facts: dict = {name: outcome(configure(model, wish(name))) for name in SPELLINGS}
    try:
        with engine(model, **wish("cpu_bytes_to_use", **BACKEND), **SMALL_CACHE) as llm:
            ask_evict_and_ask_again(llm)
    except Exception as error:
        facts["error"] = repr(error)
    facts |= {"blocks": CheckedSpec.blocks, "bytes": CheckedSpec.bytes}
    print("\nreport:", json.dumps(facts), flush=True)


@reported_release
def test_the_release_as_published_has_the_fault(checkpoint, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    from histories.stock import stock_path

    path = os.pathsep.join([str(stock_path("v0.19.1", tmp_path)), os.environ["PYTHONPATH"]])
    output = subprocess.run(
        [sys.executable, __file__, str(checkpoint(MODEL))],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    ).stdout
    found = re.search("^report: (.*)$", output, re.MULTILINE)
    assert found, output
    facts = json.loads(found[1])

    # Two spellings, two outcomes.
    assert facts["cpu_bytes_to_use"]["without_hybrid_manager"] is True
    assert facts["kv_offloading_size"]["without_hybrid_manager"] is False
    # Nobody is told what the engine works with.
    (start_up,) = re.findall("Initializing a V1 LLM engine.*", output)
    assert "kv_transfer" not in start_up
    assert "CPU KV cache pool" not in output
    # Memory is not taken, and the scheduler uses blocks that the worker does not have.
    worker, scheduler = sorted(facts["blocks"])
    assert facts["bytes"] < 0.15 * ASKED
    assert scheduler > 5 * worker
    assert re.search(rf"IndexError.* are of {worker} blocks", output), output
    assert "error" in facts


if __name__ == "__main__":
    report(Path(sys.argv[1]))
