"""How much host memory KV offloading of a model takes, by vLLM's own planning.

Which layers own KV cache is read from the model's `config.json`. All that follows is worked
out by the vLLM of this Python: the engine core plans the KV cache groups, the connector's
specification divides the host memory, and its memory check says what limit that fits into.
No GPU and no weights are needed.
"""

import copy
import importlib.util
import json
import logging
import math
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from scripts.shell import Failure

GIB = 1 << 30
# Host memory of the processes themselves: torch, tokenizers and pinned buffers of each
# worker, engine core and API server. An assumption, not measured; --process-gib changes it.
_GIB_PER_PROCESS = 4


def _gemma4(
    layers: int,
    heads: int,
    sliding_heads: int,
    full_heads: int | None,
    *,
    window: int = 1024,
    every: int = 6,
    shared: int = 0,
) -> dict[str, Any]:
    """What decides on the KV cache in a Gemma 4 `config.json`."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": sliding_heads,
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": full_heads is not None,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": window,
        "num_kv_shared_layers": shared,
        "max_position_embeddings": 262_144 if window == 1024 else 131_072,
        "layer_types": [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ],
    }


VARIANTS = {
    "31b": _gemma4(60, 32, 16, 4),
    "26b-a4b": _gemma4(30, 16, 8, 2),
    "12b": _gemma4(48, 16, 8, 1),
    "e4b": _gemma4(42, 8, 2, None, window=512, shared=18),
    "e2b": _gemma4(35, 8, 1, None, window=512, every=5, shared=20),
}


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        model: a `config.json`, its folder, or one of `VARIANTS`.
        nodes: machines that the workers are spread over.
        kv_dtype: as vLLM's `--kv-cache-dtype`; `auto` is the model's `dtype`.
        context: tokens of a session, `max_model_len`.
        resume_points: windows to keep for each session.
        offloading_size: GiB to plan with; None for what the sessions need.
        process_gib: host memory that each process takes besides the pool.
    """

    model: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    kv_dtype: str = "auto"
    dtype: str = "bfloat16"
    block_size: int = 16
    blocks_per_chunk: int = 1
    context: int = 32_768
    sessions: int = 100
    resume_points: int = 1
    offloading_size: float | None = None
    process_gib: int = _GIB_PER_PROCESS


@dataclass(frozen=True)
class Group:
    """Layers that have their blocks together.

    Attributes:
        window: tokens of the sliding window; None for full attention.
        chunks: that a session of the whole context, or its last
            window, takes.
    """

    layers: int
    block_tokens: int
    window: int | None
    chunks: int


@dataclass(frozen=True)
class Plan:
    """The answer; sizes in bytes, over all workers.

    Attributes:
        log_line: what the engine will log about the pool.
        tokens: that the pool holds in requests of the whole context, by the pin's count.
        memory_limit: the least one of a container under which the pin allocates the pool.
        shared_memory: what `/dev/shm` must have; 0 where the pin does not use it.
    """

    release: str
    question: Question
    groups: tuple[Group, ...]
    chunk_bytes: int
    bytes_per_token: float
    bytes_per_resume_point: int
    bytes_per_session: int
    offloading_gib: float
    pool_bytes: int
    tokens: int
    sessions: int
    memory_limit: int
    shared_memory: int
    log_line: str
    arguments: tuple[str, ...]


# --- the model: which layers own KV cache, and of which shape ---


@dataclass(frozen=True)
class Layer:
    """An attention layer with KV cache of its own, before tensor parallelism."""

    index: int
    kv_heads: int
    head_size: int
    window: int | None


def read_config(model: str) -> dict[str, Any]:
    """The text model's part of a `config.json`.

    Raises:
        Failure: there is no such model.
    """
    name = model.lower().removeprefix("gemma-4-").removesuffix("-it")
    if name in VARIANTS:
        return dict(VARIANTS[name])
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except OSError:
        raise Failure(
            f"{model} is neither a config.json, nor a folder with one, nor one of "
            f"{', '.join(VARIANTS)}"
        ) from None
    except ValueError as error:
        raise Failure(f"{path} is not JSON: {error}") from None
    return {**config, **config.get("text_config", {})}


def cached_layers(config: dict[str, Any]) -> list[Layer]:
    """The layers that own KV cache.

    Raises:
        Failure: the model has layers other than full and sliding-window attention.
    """
    try:
        count = config["num_hidden_layers"]
        kinds = config.get("layer_types") or ["full_attention"] * count
        owners = count - (config.get("num_kv_shared_layers") or 0)
        if foreign := set(kinds) - {"full_attention", "sliding_attention"}:
            raise Failure(f"layers of type {', '.join(sorted(foreign))} cannot be planned here")
        if "kv_lora_rank" in config:
            raise Failure("models with multi-head latent attention cannot be planned here")
        return [_layer(config, index, kinds[index]) for index in range(owners)]
    except KeyError as error:
        raise Failure(f"the model's config.json has no {error}") from None


def _layer(config: dict[str, Any], index: int, kind: str) -> Layer:
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if kind == "sliding_attention":
        return Layer(index, heads, head_size, config["sliding_window"])
    if config.get("attention_k_eq_v"):
        heads = config.get("num_global_key_value_heads") or heads
    return Layer(index, heads, config.get("global_head_dim") or head_size, None)


# --- what vLLM makes of it ---


class _Layers:
    """Stands in for the executor: knows the workers' layers, and has all the GPU memory."""

    def __init__(self, vllm_config: Any, specs: list[dict[str, Any]]) -> None:
        self.vllm_config = vllm_config
        self.specs = specs
        self.plans: list[Any] = []

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return self.specs

    def determine_available_memory(self) -> list[int]:
        return [1 << 50] * len(self.specs)

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        layouts = [layout.name for layout in get_supported_kv_cache_layouts([_backend()])]
        return [layouts] * len(self.specs)

    def set_kv_cache_layout(self, layout: str, interleave: int) -> None:
        self.vllm_config.cache_config.kv_cache_layout = layout

    def initialize_from_config(self, plans: list[Any]) -> None:
        self.plans = plans

    def compile_or_warm_up_model(self) -> None: ...


class _AttentionLayer:
    """What `Attention.get_kv_cache_spec` reads of a layer, without weights or a GPU."""

    def __init__(self, layer: Layer, vllm_config: Any) -> None:
        from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
        from vllm.v1.attention.backend import AttentionType

        shards = vllm_config.parallel_config.tensor_parallel_size
        self.attn_backend = _backend()
        self.attn_type = AttentionType.DECODER
        self.num_kv_heads = max(1, layer.kv_heads // shards)
        self.head_size = self.head_size_v = layer.head_size
        self.sliding_window = layer.window
        self.kv_cache_dtype = vllm_config.cache_config.cache_dtype
        self.kv_cache_torch_dtype = kv_cache_dtype_str_to_dtype(
            self.kv_cache_dtype, vllm_config.model_config
        )


def _backend() -> Any:
    """The attention backend of all Gemma 4 layers on a GPU."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return TritonAttentionBackend


def plan(question: Question) -> Plan:
    """Answer the question with the vLLM that this Python has.

    Raises:
        Failure: vLLM refuses the settings, or the model cannot be planned.
    """
    if importlib.util.find_spec("vllm.v1.kv_offload.cpu.host_memory") is None:
        raise Failure(f"vLLM {_release()} has not this project's patches, which size the pool")
    config = read_config(question.model)
    layers = cached_layers(config)
    _check_sharding(layers, question.tensor_parallel)
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        _write_model(Path(folder), config)
        engine = partial(_engine, folder, layers, question)
        try:
            size = question.offloading_size
            if size is None:
                # What a session takes does not depend on the size of the pool.
                size = _gib(question.sessions * _session_bytes(engine(1 << 20), question))
            return _describe(question, engine(size), size)
        except (ValueError, AssertionError, NotImplementedError) as error:
            raise Failure(f"vLLM refuses this: {_reason(error)}") from None


def _check_sharding(layers: list[Layer], shards: int) -> None:
    for heads in {layer.kv_heads for layer in layers}:
        if max(heads, shards) % min(heads, shards):
            raise Failure(f"--tp {shards} does not fit {heads} KV heads")


def _gib(size: float) -> int:
    return math.ceil(size / GIB)


def _reason(error: Exception) -> str:
    """What vLLM says, without pydantic's frame around them."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line.startswith(("Value error,", "Assertion failed,"))]
    return told[0].partition(", ")[2].partition(" [type=")[0] if told else " ".join(lines)


def _write_model(folder: Path, config: dict[str, Any]) -> None:
    """A folder that vLLM takes for the text model; other sizes do not matter here."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 256,
        "vocab_size_per_layer_input": 256,
        **{name: value for name, value in config.items() if not name.endswith("_config")},
    }
    if str(text.get("model_type")).startswith("gemma4"):
        text |= {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(text))


@dataclass(frozen=True)
class _Engine:
    """What an engine knows before its first request.

    Attributes:
        spec: the scheduler's offloading specification.
        plans: each worker's KV cache configuration.
    """

    config: Any
    kv_cache_config: Any
    spec: Any
    plans: list[Any]


def _engine(folder: str, layers: list[Layer], question: Question, size: float) -> _Engine:
    from vllm.config.cache import CacheDType
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector as connector
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    if question.kv_dtype not in get_args(CacheDType):
        raise Failure(
            f"--kv-dtype {question.kv_dtype} is not one of {', '.join(get_args(CacheDType))}"
        )
    kv_transfer = {}
    if question.blocks_per_chunk > 1:
        kv_transfer["kv_transfer_config"] = _kv_transfer(question)
    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype=question.dtype,
        max_model_len=question.context,
        tensor_parallel_size=question.tensor_parallel,
        pipeline_parallel_size=question.pipeline_parallel,
        distributed_executor_backend="mp",
        block_size=question.block_size,
        kv_offloading_size=size,
        **kv_transfer,
    ).create_engine_config()
    # Later, as a CPU's platform, which may be the one that plans, refuses some of them.
    config.cache_config.cache_dtype = question.kv_dtype

    core = EngineCore.__new__(EngineCore)
    core.model_executor = executor = _Layers(config, _worker_layers(config, layers))
    kv_cache_config = core._initialize_kv_caches(config)
    create = connector.OffloadingSpecFactory.create_spec
    if hasattr(connector, "build_offloading_config"):  # v0.33.0
        spec = create(connector.build_offloading_config(config, kv_cache_config))
    else:
        spec = create(config, kv_cache_config)
    return _Engine(config, kv_cache_config, spec, executor.plans)


def _worker_layers(config: Any, layers: list[Layer]) -> list[dict[str, Any]]:
    """KV cache specifications by layer, for each worker in the order of the ranks."""
    from vllm.distributed.utils import get_pp_indices
    from vllm.model_executor.layers.attention import Attention

    stages = config.parallel_config.pipeline_parallel_size
    count = config.model_config.hf_text_config.num_hidden_layers
    workers = []
    for stage in range(stages):
        start, end = get_pp_indices(count, stage, stages)
        specs = {
            f"model.layers.{layer.index}.self_attn.attn": Attention.get_kv_cache_spec(
                _AttentionLayer(layer, config), config
            )
            for layer in layers
            if start <= layer.index < end
        }
        if not specs:
            raise Failure(
                f"--pp {stages}: stage {stage} would only have layers that read the KV cache "
                "of another stage"
            )
        workers += [dict(specs) for _ in range(config.parallel_config.tensor_parallel_size)]
    return workers


def _kv_transfer(question: Question) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"blocks_per_chunk": question.blocks_per_chunk},
    }


# --- the answer ---


def _groups(engine: _Engine, context: int) -> list[Group]:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    result = []
    for number, group in enumerate(engine.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        result.append(
            Group(
                layers=len(group.layer_names),
                block_tokens=spec.block_size,
                window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
                chunks=_chunks_per_session(engine, number, context),
            )
        )
    return result


def _chunks_per_session(engine: _Engine, number: int, context: int) -> int:
    """Chunks of one group for a request of max_model_len, as the pin counts them."""
    if hasattr(engine.spec, "cpu_info"):  # v0.33.0
        from vllm.v1.kv_offload.cpu import common

        config = replace(engine.spec.config, groups=(engine.spec.config.groups[number],))
        # It says how many tokens chunks hold: the least that hold the request are meant.
        chunks = range(1, context + 1)
        return chunks[
            bisect_left(chunks, context, key=partial(common._kv_cache_size_tokens, config))
        ]
    spec = copy.copy(engine.spec)
    spec.kv_cache_config = copy.copy(spec.kv_cache_config)
    spec.kv_cache_config.kv_cache_groups = [engine.kv_cache_config.kv_cache_groups[number]]
    return spec._blocks_per_request()


def _chunk_bytes(spec: Any) -> int:
    return spec.kv_bytes_per_chunk if hasattr(spec, "cpu_info") else spec.bytes_per_block


def _num_chunks(spec: Any) -> int:
    return spec.num_chunks if hasattr(spec, "cpu_info") else spec.num_blocks


def _session_bytes(engine: _Engine, question: Question) -> int:
    """A whole context in the full layers, and windows at the places to resume from."""
    groups = _groups(engine, question.context)
    windows = sum(group.chunks for group in groups if group.window)
    full = sum(group.chunks for group in groups if not group.window)
    return _chunk_bytes(engine.spec) * (full + question.resume_points * windows)


def _describe(question: Question, engine: _Engine, size: float) -> Plan:
    spec = engine.spec
    groups = _groups(engine, question.context)
    chunk_bytes, num_chunks = _chunk_bytes(spec), _num_chunks(spec)
    windows = sum(group.chunks for group in groups if group.window)
    session = _session_bytes(engine, question)
    line = _logged(spec.get_manager)
    per_request = sum(group.chunks for group in groups)
    on_node = _bytes_on_fullest_node(engine, question, num_chunks)
    processes = len(engine.plans) // question.nodes + 2
    return Plan(
        release=_release(),
        question=question,
        groups=tuple(groups),
        chunk_bytes=chunk_bytes,
        bytes_per_token=sum(
            chunk_bytes / (group.block_tokens * question.blocks_per_chunk)
            for group in groups
            if not group.window
        ),
        bytes_per_resume_point=chunk_bytes * windows,
        bytes_per_session=session,
        offloading_gib=size,
        pool_bytes=num_chunks * chunk_bytes,
        tokens=num_chunks * question.context // per_request,
        sessions=num_chunks * chunk_bytes // session,
        memory_limit=_memory_limit(on_node, processes * question.process_gib * GIB),
        # The region is one file, of full length on each node.
        shared_memory=num_chunks * chunk_bytes if hasattr(spec, "cpu_info") else 0,
        log_line=line,
        arguments=_arguments(question, size),
    )


def _bytes_on_fullest_node(engine: _Engine, question: Question, num_chunks: int) -> int:
    shares = [
        num_chunks * question.blocks_per_chunk * plan.bytes_per_block for plan in engine.plans
    ]
    if len(shares) % question.nodes:
        raise Failure(f"--nodes {question.nodes} does not divide {len(shares)} workers")
    per_node = len(shares) // question.nodes
    return max(sum(shares[i : i + per_node]) for i in range(0, len(shares), per_node))


def _memory_limit(pool: int, processes: int) -> int:
    """The least limit, in whole GiB, under which the pin's own check lets the pool be."""
    from vllm.v1.kv_offload.cpu.host_memory import MemoryLimit

    gib = _gib(pool + processes)
    while True:
        limit = MemoryLimit("", gib * GIB, gib * GIB - processes)
        if limit.available - limit.margin >= pool:
            return gib * GIB
        gib += 1


def _logged(action: Callable[[], Any]) -> str:
    """The message that vLLM's log gets from `action`."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("vllm.v1.kv_offload.cpu.spec")
    logger.addHandler(handler)
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        action()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    return messages[-1] if messages else ""


def _release() -> str:
    from vllm import __version__

    return __version__


def _arguments(question: Question, size: float) -> tuple[str, ...]:
    """What to add to `vllm serve MODEL`."""
    arguments = ["--kv-offloading-size", f"{size:g}", "--max-model-len", str(question.context)]
    for option, value, default in (
        ("--tensor-parallel-size", question.tensor_parallel, 1),
        ("--pipeline-parallel-size", question.pipeline_parallel, 1),
        ("--nnodes", question.nodes, 1),
        ("--kv-cache-dtype", question.kv_dtype, "auto"),
        ("--block-size", question.block_size, 16),
    ):
        if value != default:
            arguments += [option, str(value)]
    if question.blocks_per_chunk > 1:
        arguments += ["--kv-transfer-config", json.dumps(_kv_transfer(question))]
    return tuple(arguments)
