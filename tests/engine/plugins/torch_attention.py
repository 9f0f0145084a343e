"""An attention backend for vLLM 0.19.1 on the CPU in plain torch: slow, short and exact.

The KV cache has the layout of the Triton backend, the one Gemma 4 runs on: (blocks, keys and
values, tokens, heads, head size), cross-layer order included, and no limit on the head size.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)


class TorchAttentionBackend(AttentionBackend):
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type["TorchAttention"]:
        return TorchAttention

    @staticmethod
    def get_builder_cls() -> type["MetadataBuilder"]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @staticmethod
    def use_cascade_attention(*args, **kwargs) -> bool:
        return False


@dataclass
class Metadata:
    num_tokens: int
    query_starts: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        common = common_attn_metadata
        return Metadata(
            num_tokens=common.num_actual_tokens,
            query_starts=common.query_start_loc[: common.num_reqs + 1].tolist(),
            seq_lens=common.seq_lens[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class TorchAttention(AttentionImpl):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        sinks=None,
    ):
        for name, wanted in {
            "ALiBi": alibi_slopes is not None,
            "soft-capped scores": bool(logits_soft_cap),
            "attention sinks": sinks is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
        }.items():
            if wanted:
                raise NotImplementedError(f"torch_attention has no {name}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        if attn_metadata is None:  # profiling: there is no KV cache yet
            return output
        keys, values = kv_cache.unbind(1)
        if self.kv_sharing_target_layer_name is None:
            tokens = attn_metadata.num_tokens
            block_size = keys.shape[1]
            slots = attn_metadata.slot_mapping[:tokens].long()
            keys[slots // block_size, slots % block_size] = key[:tokens]
            values[slots // block_size, slots % block_size] = value[:tokens]
        starts = attn_metadata.query_starts
        for request, seq_len in enumerate(attn_metadata.seq_lens):
            scheduled = slice(starts[request], starts[request + 1])
            output[scheduled] = self._attend(
                query[scheduled],
                keys,
                values,
                attn_metadata.block_table[request],
                seq_len,
            ).view_as(output[scheduled])
        return output

    def _attend(self, query, keys, values, blocks, seq_len):
        """Attention of one request's last tokens to all that its layer may see of it."""
        queries = torch.arange(seq_len - len(query), seq_len)
        first = 0
        if self.sliding_window is not None:
            first = max(0, seq_len - len(query) - self.sliding_window + 1)
        positions = torch.arange(first, seq_len)
        block_size = keys.shape[1]
        block = blocks[positions // block_size].long()
        offset = positions % block_size
        visible = positions <= queries[:, None]
        if self.sliding_window is not None:
            visible &= positions > queries[:, None] - self.sliding_window

        # (heads, tokens, head size), each KV head repeated for the queries that share it
        repeats = self.num_heads // self.num_kv_heads
        q = query.float().transpose(0, 1)
        k = keys[block, offset].float().transpose(0, 1).repeat_interleave(repeats, dim=0)
        v = values[block, offset].float().transpose(0, 1).repeat_interleave(repeats, dim=0)
        scores = (q @ k.transpose(1, 2)) * self.scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return (weights @ v).transpose(0, 1)
