"""The planner against vLLM: what it says beforehand is what the engine logs."""

import json
import logging

import pytest

from scripts import plan_capacity
from scripts.capacity import GIB, VARIANTS, Question, plan
from scripts.shell import Failure

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("model", ["gemma4-31b", "gemma4-e4b", "qwen3"])
def test_the_engine_logs_what_was_planned(checkpoint, model):
    from engines import BLOCK_SIZE, ENGINE_SETTINGS, engine

    size = 1 / 16
    planned = plan(
        Question(
            model=str(checkpoint(model)),
            dtype=ENGINE_SETTINGS["dtype"],
            block_size=BLOCK_SIZE,
            context=ENGINE_SETTINGS["max_model_len"],
            offloading_size=size,
        )
    )
    backend = {"spec_name": "HostMemorySpec", "spec_module_path": "host_memory_spec"}
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("vllm").addHandler(handler)
    try:
        with engine(
            checkpoint(model),
            kv_offloading_size=size,
            kv_transfer={"kv_connector_extra_config": backend},
            num_gpu_blocks_override=256,
        ):
            pass
    finally:
        logging.getLogger("vllm").removeHandler(handler)
    (logged,) = [text for text in messages if text.startswith("CPU KV cache pool")]
    assert logged == planned.log_line
    assert f"{planned.tokens:,} tokens" in logged


# By variant: layers and tokens in a block of the sliding groups and of the full one, then
# what a token and a place to resume take.
GEOMETRY = {
    "31b": (5, 10, 16, 32, 80 * KIB, 800 * MIB),
    "26b-a4b": (5, 5, 16, 32, 20 * KIB, 200 * MIB),
    "12b": (5, 8, 16, 64, 16 * KIB, 320 * MIB),
    "e4b": (5, 4, 32, 16, 16 * KIB, 20 * MIB),
    "e2b": (4, 3, 32, 16, 6 * KIB, 6 * MIB),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant):
    sliding, layers, sliding_block, full_block, token, window = GEOMETRY[variant]
    planned = plan(Question(model=variant, context=8192))
    *windows, full = planned.groups
    assert len(windows) == sliding
    assert {(group.layers, group.block_tokens) for group in windows} == {
        (layers, sliding_block)
    }
    assert (full.layers, full.block_tokens, full.window) == (layers, full_block, None)
    assert planned.bytes_per_token == token
    assert planned.bytes_per_resume_point == window
    assert planned.bytes_per_session == 8192 * token + window
    assert planned.sessions >= planned.question.sessions


def test_the_readmes_example():
    """120 GiB for the 31B, as in the README and in the report."""
    planned = plan(Question(model="31b", offloading_size=120))
    assert "allocated 120.0 GiB of 120.0 GiB asked for with kv_offloading_size" in (
        planned.log_line
    )
    assert "49,152 " in planned.log_line
    assert "It holds 1,198,372 tokens in requests of max_model_len 32,768." in planned.log_line
    readme = (plan_capacity.ROOT / "README.md").read_text()
    assert "as 49,152 blocks of 2.5 MiB on 1 worker(s). It holds 1,198,372 tokens" in readme


def test_parallelism():
    one = plan(Question(model="31b"))
    # Every GPU holds at least one KV head of the full layers, of which there are four.
    eight = plan(Question(model="31b", tensor_parallel=8))
    assert eight.bytes_per_token == 2 * one.bytes_per_token
    assert "on 8 worker(s)" in eight.log_line
    # Stages of unequal groups: a block takes the size of the longest one.
    stages = plan(Question(model="31b", pipeline_parallel=4))
    assert len({group.layers for group in stages.groups}) > 1
    assert stages.bytes_per_token > one.bytes_per_token


def test_nodes_share_the_pool():
    both = plan(Question(model="31b", tensor_parallel=4, nodes=2, offloading_size=100))
    one = plan(Question(model="31b", tensor_parallel=4, offloading_size=100))
    assert one.memory_limit - both.memory_limit >= 50 * GIB
    # Where the pool is a file, each node has all of it, and fills its part.
    assert both.shared_memory == one.shared_memory


def test_what_the_container_needs():
    from vllm.v1.kv_offload.cpu.host_memory import (
        MemoryLimit,
        MemoryRequest,
        check_memory_requests,
    )

    planned = plan(Question(model="26b-a4b", offloading_size=64))
    processes = 3 * planned.question.process_gib * GIB

    def start(total):
        limit = MemoryLimit("cgroup", total, total - processes)
        check_memory_requests([MemoryRequest("host", "boot", planned.pool_bytes, [limit])])

    start(planned.memory_limit)
    with pytest.raises(ValueError, match="CPU KV cache pool"):
        start(planned.memory_limit - GIB)
    uses_shared_memory = not planned.release.startswith("0.19.")
    assert planned.shared_memory == (planned.pool_bytes if uses_shared_memory else 0)


def test_smaller_cache_types_and_larger_chunks():
    full = plan(Question(model="31b"))
    half = plan(Question(model="31b", kv_dtype="fp8"))
    assert 2 * half.bytes_per_token == full.bytes_per_token
    assert half.arguments[-2:] == ("--kv-cache-dtype", "fp8")
    chunks = plan(Question(model="31b", blocks_per_chunk=4))
    assert chunks.chunk_bytes == 4 * full.chunk_bytes
    assert json.loads(chunks.arguments[-1])["kv_connector_extra_config"] == {
        "blocks_per_chunk": 4
    }


def test_the_flags_are_vllms(tmp_path):
    """What is printed for people to copy is accepted by the pin's own command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    question = Question(
        model="31b",
        tensor_parallel=2,
        pipeline_parallel=2,
        nodes=2,
        kv_dtype="fp8",
        block_size=32,
        blocks_per_chunk=2,
        offloading_size=12.5,
    )
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(list(plan(question).arguments))
    assert parsed.kv_offloading_size == 12.5
    assert (parsed.tensor_parallel_size, parsed.pipeline_parallel_size) == (2, 2)
    assert (parsed.nnodes, parsed.kv_cache_dtype, parsed.block_size) == (2, "fp8", 32)


def test_a_multimodal_config_is_read(tmp_path):
    """As published: the text model's numbers are one level down."""
    text = dict(VARIANTS["e4b"])
    del text["architectures"]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"hidden_size": 768},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(Question(model=str(tmp_path))).groups == plan(Question(model="e4b")).groups


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            {"model": "27b"},
            "27b is neither a config.json, nor a folder with one, nor one of 31b",
        ),
        ({"model": "31b", "tensor_parallel": 3}, "--tp 3 does not fit 16 KV heads|4 KV heads"),
        ({"model": "31b", "nodes": 2}, "--nodes 2 does not divide 1 workers"),
        ({"model": "e2b", "pipeline_parallel": 2}, "pipeline stage|--pp 2: stage 1"),
        ({"model": "31b", "kv_dtype": "fp7"}, "--kv-dtype fp7 is not one of auto"),
        ({"model": "31b", "context": 1 << 20}, "vLLM refuses this: .*max_model_len"),
        ({"model": "31b", "offloading_size": 0.001}, "vLLM refuses this: .* KV cache group"),
        (
            {"model": "31b", "offloading_size": -1},
            "vLLM refuses this: -1 is neither a positive number of GiB",
        ),
    ],
)
def test_what_cannot_be_planned(question, message):
    with pytest.raises(Failure, match=message):
        plan(Question(**question))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "has no 'num_hidden_layers'"),
        ('{"num_hidden_layers": 1, "layer_types": ["mamba"]}', "layers of type mamba"),
        ('{"num_hidden_layers": 1, "kv_lora_rank": 512}', "latent attention"),
    ],
)
def test_configs_that_cannot_be_planned(tmp_path, config, message):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(Failure, match=message):
        plan(Question(model=str(tmp_path)))


def test_command_line(capsys):
    assert plan_capacity.main(["31b", "--offloading-size", "120"]) == 0
    text = capsys.readouterr().out
    assert "5 x 10 layers, window of 1,024 tokens: blocks of 16 tokens, 64 chunks" in text
    assert "--kv-offloading-size 120 holds 36 sessions" in text
    assert text.rstrip().endswith(
        "vllm serve MODEL --kv-offloading-size 120 --max-model-len 32768"
    )
    assert plan_capacity.main(["31b", "--offloading-size", "120", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["sessions"] == 36
    assert answer["question"]["model"] == "31b"
    assert plan_capacity.main(["27b"]) == 1
    assert capsys.readouterr().err.startswith("error: 27b is neither")
