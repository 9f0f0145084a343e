"""The engine in this process: right tokens, and the same ones from reloaded KV blocks."""

import random

import torch
from engines import BLOCK_SIZE, counter, engine, generate, offloading

NEW_TOKENS = 24


def prompt(seed: int, length: int = 200) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(4, 260) for _ in range(length)]


def test_gemma4_computes_what_transformers_computes(checkpoint):
    """Two prompts together, one longer than the sliding window, in a batch and in chunks."""
    from transformers import AutoModelForCausalLM

    folder = checkpoint("gemma4-31b")
    prompts = [prompt(1), prompt(2, length=50)]
    settings = {"max_num_batched_tokens": 96, "kv_transfer": offloading(96 << 20)}
    with engine(folder, **settings) as llm:
        answers = [
            list(output.outputs[0].token_ids) for output in generate(llm, prompts, NEW_TOKENS)
        ]
        described = str(llm.llm_engine.vllm_config)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        groups = len(scheduler.kv_cache_config.kv_cache_groups)

    # Gemma 4 has several groups of layers, unless the hybrid manager is off.
    assert f"enable_hybrid_kv_cache_manager={groups > 1}" in described

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for tokens, answer in zip(prompts, answers):
        assert len(set(answer)) > NEW_TOKENS // 2
        with torch.no_grad():
            logits = reference(torch.tensor([tokens + answer])).logits[0, len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.max(dim=1).values, rtol=0, atol=1e-3)


def test_one_group_reloads_what_was_computed(checkpoint):
    folder = checkpoint("qwen3")
    wanted, fillers = prompt(1), [prompt(seed) for seed in range(2, 12)]
    with engine(folder, enable_prefix_caching=False) as cold:
        expected = [
            output.outputs[0].token_ids
            for output in generate(cold, [wanted, prompt(12)], NEW_TOKENS)
        ]
    settings = {"num_gpu_blocks_override": 40, "kv_transfer": offloading(64 << 20)}
    with engine(folder, **settings) as llm:
        (first,) = generate(llm, [wanted], NEW_TOKENS)
        assert first.outputs[0].token_ids == expected[0]
        generate(llm, fillers, NEW_TOKENS)  # their blocks take the place of the first's
        before = counter(llm, "vllm:external_prefix_cache_hits")
        # A new prompt beside it: a step that only loads reports no statistics.
        reloaded, fresh = generate(llm, [wanted, prompt(12)], NEW_TOKENS)
        hits = counter(llm, "vllm:external_prefix_cache_hits") - before

    whole_blocks = len(wanted) // BLOCK_SIZE * BLOCK_SIZE
    assert hits == reloaded.num_cached_tokens == whole_blocks
    assert fresh.num_cached_tokens == 0
    assert [o.outputs[0].token_ids for o in (reloaded, fresh)] == expected
