"""vLLM's compiled CPU ops in plain torch, for a wheel whose own do not load.

The CPU wheel of vLLM 0.19.1 was compiled for torch 2.10, and torch 2.10 comes with gigabytes
of CUDA. On the torch of the test environment its compiled ops are missing: vLLM warns and
goes on until it needs one. vLLM calls `register` in each of its processes, spawned ones too,
through the ``vllm.general_plugins`` entry point beside this file. Where the compiled ops
did load, as those of vLLM 0.33.0 do, nothing is replaced.
"""

import torch
from torch.nn import functional


def register() -> None:
    from vllm import _custom_ops  # noqa: F401  (loads the compiled ops, if they can be)
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not current_platform.is_cpu() or hasattr(torch.ops._C, "rotary_embedding"):
        return
    register_backend(AttentionBackendEnum.CPU_ATTN, "torch_attention.TorchAttentionBackend")
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    # Gemma 4's, which this release does not know on the CPU.
    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.GELU] = gelu_and_mul
    for schema, function in OPS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """Rotate queries and keys in place, as vLLM's own torch version does it on copies."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotated = RotaryEmbedding.forward_static(
        positions, query, key, head_size, cos_sin_cache.shape[-1], cos_sin_cache, is_neox
    )
    for tensor, new in zip((query, key), rotated):
        if tensor is not None:
            tensor.copy_(new)


def compute_slot_mapping(query_start_loc, positions, block_table, slot_mapping, block_size):
    """Where in the KV cache each scheduled token goes: its block, times size, plus offset."""
    starts = query_start_loc.long()
    total = int(starts[-1])
    requests = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    positions = positions[:total]
    blocks = block_table[requests, positions // block_size].long()
    slot_mapping[:total] = blocks * block_size + positions % block_size


def gelu_tanh_and_mul(out, gate_and_up) -> None:
    gate, up = gate_and_up.chunk(2, dim=-1)
    out.copy_(functional.gelu(gate, approximate="tanh") * up)


def gelu_and_mul(gate_and_up) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.gelu(gate) * up


library = torch.library.Library("_C", "FRAGMENT")
OPS = {
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size,"
    " Tensor cos_sin_cache, bool is_neox) -> ()": rotary_embedding,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions,"
    " Tensor block_table, Tensor(a!) slot_mapping, int block_size) -> ()": compute_slot_mapping,
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()": gelu_tanh_and_mul,
}
