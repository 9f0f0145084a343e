"""Small random-weight checkpoints with the structure of the real models.

What decides how the KV cache is laid out is kept: the pattern of sliding and full
attention layers, two head sizes, two KV head counts, K projections reused as V, layers
that share another layer's cache, a sliding window far shorter than the context. What does
not is small, so that a checkpoint takes a few MB and an engine answers in milliseconds.

The same name and seed give the same bytes everywhere: the weights come from NumPy's
RandomState, whose stream is frozen, by arithmetic that rounds alike on every machine, and
config.json is written here, not by a version of transformers.

    python checkpoints.py NAME DIRECTORY
"""

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<unk>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # one token for each byte
MAX_POSITION = 4096
ADAPTER = "adapter"  # folder, beside the weights, of the models that have one
# Scale of queries and of keys. With 1, attention averages over so many tokens that the
# output hardly depends on any of them; with 2 it picks a few, and changing any single token of
# a prompt changes what follows.
ATTENTION_NORM = 2.0


@dataclass(frozen=True)
class Shape:
    """What all the models here have in common."""

    layers: int
    kv_heads: int
    head_dim: int = 64
    heads: int = 8
    hidden: int = 64
    intermediate: int = 128

    @property
    def common_config(self) -> dict:
        return {
            "attention_bias": False,
            "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
            "dtype": "float32",
            "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": MAX_POSITION,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": VOCAB_SIZE,
        }

    def caches(self) -> list[tuple[int | None, int]]:
        """Window, if any, and values per token, of each layer that owns KV cache."""
        return [(None, 2 * self.kv_heads * self.head_dim)] * self.layers

    def block_sizes(self, block_size: int) -> set[int]:
        """Tokens in the blocks of vLLM's KV cache groups: all pages are of one size."""
        values = {values for _, values in self.caches()}
        return {block_size * max(values) // value for value in values}

    def blocks_needed(self, tokens: int, budget: int, block_size: int, hybrid: bool) -> int:
        """Blocks for a request, scheduled a budget of tokens at a time."""
        if not hybrid:
            return math.ceil(tokens / block_size)
        caches = self.caches()
        group_size = min(map(caches.count, set(caches)))
        needed = 0
        for window, values in set(caches):
            size = block_size * max(values for _, values in caches) // values
            blocks = math.ceil(tokens / size)
            if window:
                blocks = min(blocks, math.ceil((window - 1 + budget) / size) + 1)
            needed += blocks * math.ceil(caches.count((window, values)) / group_size)
        return needed

    def bytes_per_block(self, block_size: int, hybrid: bool) -> int:
        """What a block takes in all layers' float32 caches."""
        caches = self.caches()
        if not hybrid:
            return 4 * block_size * sum(values for _, values in caches)
        group_size = min(map(caches.count, set(caches)))
        return 4 * block_size * group_size * max(values for _, values in caches)


@dataclass(frozen=True)
class Interleaved(Shape):
    """So many layers with a sliding window to each with full attention."""

    sliding_per_full: int = 5
    window: int = 64

    @property
    def layer_types(self) -> list[str]:
        period = self.sliding_per_full + 1
        assert self.layers % period == 0, "the last layer has to be a full one"
        return [
            "sliding_attention" if (i + 1) % period else "full_attention"
            for i in range(self.layers)
        ]

    def caches(self) -> list[tuple[int | None, int]]:
        windows = {"sliding_attention": self.window, "full_attention": None}
        return [(windows[name], 2 * self.kv_heads * self.head_dim) for name in self.layer_types]


@dataclass(frozen=True)
class Gemma4(Interleaved):
    """Gemma 4's text model.

    Pages of a sliding and of a full layer hold ``kv_heads * head_dim`` and
    ``global_kv_heads * global_head_dim`` values per token; the ratio of the two decides the
    block sizes that vLLM picks for the groups.
    """

    global_head_dim: int = 128
    global_kv_heads: int | None = None  # given: full layers use their keys as values
    shared_layers: int = 0  # trailing layers that read an earlier layer's cache
    per_layer_input: int = 0  # width of the per-layer embeddings
    experts: int = 0  # of which two are active, beside the MLP

    def caches(self) -> list[tuple[int | None, int]]:
        kinds = {
            "sliding_attention": (self.window, 2 * self.kv_heads * self.head_dim),
            "full_attention": (
                None,
                2 * (self.global_kv_heads or self.kv_heads) * self.global_head_dim,
            ),
        }
        return [kinds[name] for name in self.layer_types[: self.layers - self.shared_layers]]

    def config(self) -> dict:
        return self.common_config | {
            "architectures": ["Gemma4ForCausalLM"],
            "attention_k_eq_v": self.global_kv_heads is not None,
            "enable_moe_block": bool(self.experts),
            "final_logit_softcapping": 30.0,
            "global_head_dim": self.global_head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": self.per_layer_input,
            "layer_types": self.layer_types,
            "model_type": "gemma4_text",
            "moe_intermediate_size": self.intermediate if self.experts else None,
            "num_experts": self.experts or None,
            "num_global_key_value_heads": self.global_kv_heads,
            "num_kv_shared_layers": self.shared_layers,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "sliding_window": self.window,
            "top_k_experts": 2 if self.experts else None,
            "use_double_wide_mlp": bool(self.shared_layers),
            "vocab_size_per_layer_input": VOCAB_SIZE,
        }

    def weights(self, draw: "Draw") -> Iterator[tuple[str, np.ndarray]]:
        hidden, per_layer = self.hidden, self.per_layer_input
        yield "model.embed_tokens.weight", draw.embedding(VOCAB_SIZE, hidden)
        if per_layer:
            width = self.layers * per_layer
            yield (
                "model.embed_tokens_per_layer.weight",
                draw.embedding(VOCAB_SIZE, width, scale=per_layer),
            )
            yield "model.per_layer_model_projection.weight", draw.matrix(width, hidden)
            yield "model.per_layer_projection_norm.weight", draw.norm(per_layer)
        for i, layer_type in enumerate(self.layer_types):
            prefix = f"model.layers.{i}"
            full = layer_type == "full_attention"
            head_dim = self.global_head_dim if full else self.head_dim
            keys_are_values = full and self.global_kv_heads is not None
            kv_heads = self.global_kv_heads if keys_are_values else self.kv_heads
            attn = f"{prefix}.self_attn"
            yield f"{attn}.q_proj.weight", draw.matrix(self.heads * head_dim, hidden)
            yield f"{attn}.k_proj.weight", draw.matrix(kv_heads * head_dim, hidden)
            if not keys_are_values:
                yield f"{attn}.v_proj.weight", draw.matrix(kv_heads * head_dim, hidden)
            yield f"{attn}.o_proj.weight", draw.matrix(hidden, self.heads * head_dim)
            # Gemma 4 does not divide the scores by sqrt(head_dim); the norms do it here.
            for name in ("q_norm", "k_norm"):
                weight = draw.norm(head_dim, ATTENTION_NORM * head_dim**-0.25)
                yield f"{attn}.{name}.weight", weight
            shared = i >= self.layers - self.shared_layers
            inner = self.intermediate * (2 if shared else 1)
            yield f"{prefix}.mlp.gate_proj.weight", draw.matrix(inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", draw.matrix(inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", draw.matrix(hidden, inner)
            norms = [
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]
            if self.experts:
                norms += [
                    "post_feedforward_layernorm_1",
                    "post_feedforward_layernorm_2",
                    "pre_feedforward_layernorm_2",
                ]
                router, experts = f"{prefix}.router", f"{prefix}.experts"
                yield f"{router}.proj.weight", draw.matrix(self.experts, hidden, gain=8.0)
                yield f"{router}.scale", draw.norm(hidden, math.sqrt(hidden))
                yield f"{router}.per_expert_scale", draw.norm(self.experts)
                gate_up = [draw.matrix(2 * inner, hidden) for _ in range(self.experts)]
                yield f"{experts}.gate_up_proj", np.stack(gate_up)
                down = [draw.matrix(hidden, inner) for _ in range(self.experts)]
                yield f"{experts}.down_proj", np.stack(down)
            if per_layer:
                norms.append("post_per_layer_input_norm")
                yield (
                    f"{prefix}.per_layer_input_gate.weight",
                    draw.matrix(per_layer, hidden),
                )
                yield (
                    f"{prefix}.per_layer_projection.weight",
                    draw.matrix(hidden, per_layer),
                )
            for name in norms:
                yield f"{prefix}.{name}.weight", draw.norm(hidden)
            yield f"{prefix}.layer_scalar", np.ones(1, dtype=np.float32)
        yield "model.norm.weight", draw.norm(hidden)
        yield "lm_head.weight", draw.matrix(VOCAB_SIZE, hidden, gain=3.0)


class Plain(Shape):
    """The weights that Qwen 3 and Gemma 3 share but for their norms."""

    norms: ClassVar[tuple[str, ...]]
    norm_offset: ClassVar[float] = 0.0  # the model adds it to what is in the checkpoint

    def weights(self, draw: "Draw") -> Iterator[tuple[str, np.ndarray]]:
        hidden = self.hidden
        yield "model.embed_tokens.weight", draw.embedding(VOCAB_SIZE, hidden)
        for i in range(self.layers):
            prefix = f"model.layers.{i}"
            attn = f"{prefix}.self_attn"
            for name, heads in (
                ("q_proj", self.heads),
                ("k_proj", self.kv_heads),
                ("v_proj", self.kv_heads),
            ):
                yield f"{attn}.{name}.weight", draw.matrix(heads * self.head_dim, hidden)
            yield (
                f"{attn}.o_proj.weight",
                draw.matrix(hidden, self.heads * self.head_dim, gain=2.0),
            )
            for name in ("q_norm", "k_norm"):
                weight = draw.norm(self.head_dim, ATTENTION_NORM)
                yield f"{attn}.{name}.weight", weight - np.float32(self.norm_offset)
            inner = self.intermediate
            yield f"{prefix}.mlp.gate_proj.weight", draw.matrix(inner, hidden)
            yield f"{prefix}.mlp.up_proj.weight", draw.matrix(inner, hidden)
            yield f"{prefix}.mlp.down_proj.weight", draw.matrix(hidden, inner)
            for name in self.norms:
                weight = draw.norm(hidden) - np.float32(self.norm_offset)
                yield f"{prefix}.{name}.weight", weight
        yield "model.norm.weight", draw.norm(hidden) - np.float32(self.norm_offset)
        yield "lm_head.weight", draw.matrix(VOCAB_SIZE, hidden, gain=3.0)


class Qwen3(Plain):
    """Full attention only: one KV cache group."""

    norms = ("input_layernorm", "post_attention_layernorm")

    def config(self) -> dict:
        return self.common_config | {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_act": "silu",
            "model_type": "qwen3",
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "rope_theta": 1e6,
        }


class Gemma3(Interleaved, Plain):
    """Two kinds of layers, of one head size: several groups, equal blocks."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )
    norm_offset = 1.0

    def config(self) -> dict:
        return self.common_config | {
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": self.layer_types,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": self.head_dim,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "sliding_window": self.window,
        }


class Draw:
    """Random tensors, sized so that every layer and every cached token matters."""

    def __init__(self, seed: int):
        self._random = np.random.RandomState(seed)

    def _unit(self, *shape: int) -> np.ndarray:
        """Even over an interval around 0, with a variance of 1."""
        return (self._random.random_sample(shape) * 2 - 1) * math.sqrt(3)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return (self._unit(rows, columns) * (gain / math.sqrt(columns))).astype(np.float32)

    def embedding(self, rows: int, columns: int, scale: int | None = None) -> np.ndarray:
        # Gemma multiplies embeddings by the square root of their width.
        return (self._unit(rows, columns) / math.sqrt(scale or columns)).astype(np.float32)

    def norm(self, width: int, centre: float = 1.0) -> np.ndarray:
        return (centre * (1.0 + 0.1 * self._unit(width))).astype(np.float32)


# Block sizes are those of vLLM with 16 asked for and every group managed on its own.
MODELS: dict[str, Shape] = {
    # 31B: sliding blocks hold half the tokens of full ones (16 and 32).
    "gemma4-31b": Gemma4(layers=12, kv_heads=4, global_kv_heads=1),
    # 26B-A4B: the same, with experts.
    "gemma4-26b-a4b": Gemma4(layers=6, kv_heads=4, global_kv_heads=1, experts=4),
    # 31B on eight GPUs: blocks of one size.
    "gemma4-equal": Gemma4(layers=12, kv_heads=2, global_kv_heads=1),
    # 12B: a quarter (16 and 64).
    "gemma4-12b": Gemma4(layers=12, kv_heads=8, global_kv_heads=1),
    # E4B: sliding blocks are the larger ones (32 and 16); six layers own no cache.
    "gemma4-e4b": Gemma4(layers=18, kv_heads=1, shared_layers=6, per_layer_input=16),
    # E2B: the same with four sliding layers to each full one.
    "gemma4-e2b": Gemma4(
        layers=15, kv_heads=1, sliding_per_full=4, shared_layers=5, per_layer_input=16
    ),
    # The real head sizes.
    "gemma4-31b-heads": Gemma4(
        layers=6,
        kv_heads=4,
        head_dim=256,
        global_head_dim=512,
        global_kv_heads=1,
    ),
    # Controls.
    "gemma3": Gemma3(layers=6, kv_heads=2),
    "qwen3": Qwen3(layers=4, kv_heads=2),
}


def write(name: str, directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint and its tokenizer; the directory is ready to be served."""
    model = MODELS[name]
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps(model.config(), indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(config)
    save_file(
        dict(model.weights(Draw(seed))),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(directory)
    if isinstance(model, Plain):
        write_adapter(model, directory / ADAPTER, seed)
    return directory


def writer(root: Path) -> Callable[[str], Path]:
    """A function that writes a checkpoint below a folder, once, and returns where it is."""

    def written(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else write(name, folder)

    return written


def write_adapter(model: Plain, directory: Path, seed: int) -> None:
    """A LoRA adapter that makes other keys and values."""
    directory.mkdir(exist_ok=True)
    rank, draw = 8, Draw(seed + 1)
    weights = {}
    for i in range(model.layers):
        for name in ("k_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{i}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = draw.matrix(rank, model.hidden)
            rows = model.kv_heads * model.head_dim
            weights[f"{prefix}.lora_B.weight"] = draw.matrix(rows, rank)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": "",
        "lora_alpha": rank,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": ["k_proj", "v_proj"],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tokenizer(directory: Path) -> None:
    """One token per byte of UTF-8: any text has its tokens, and any tokens a text."""
    vocabulary = list(SPECIAL_TOKENS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[])
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos = SPECIAL_TOKENS.index("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "model_max_length": MAX_POSITION,
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    }
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (directory / "tokenizer_config.json").write_text(text)


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    print(write(name, Path(directory)))
