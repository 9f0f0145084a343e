"""The bed finds what is wrong on purpose."""

import re

import pytest
from cases import BITTEN, SEED, STOCK, TOLD_APART, UNPROTECTED
from checkpoints import MODELS
from engines import engine, generate, offloading
from environment import RELEASE
from workloads import tokens

from tests.histories.planted import remove_protection


@pytest.mark.parametrize("case", BITTEN)
@pytest.mark.parametrize("spec", ["SwapsTwoBlocksSpec", "LosesABlockSpec", "CopiesLateSpec"])
def test_faulty_backend_gives_wrong_answers(run, case, spec, caught):
    wrong = run(case, spec=spec).wrong
    assert wrong
    caught(SEED, wrong[0])


def test_connector_without_protection(run, monkeypatch, caught):
    """Blocks go to new owners while a store still reads them."""
    remove_protection(monkeypatch)
    problems = run(UNPROTECTED).problems
    assert any("it has a new owner" in problem for problem in problems), problems
    caught(SEED, problems[0])


@pytest.mark.parametrize("case", TOLD_APART)
def test_requests_that_are_not_told_apart(run, monkeypatch, case, caught):
    """Block hashes of nothing but tokens: other pictures, adapters and salts share blocks."""
    from vllm.v1.core import kv_cache_utils

    def tokens_alone(request, start, end, first_picture):
        return None, first_picture

    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", tokens_alone)
    wrong = "\n".join(run(case).wrong)
    assert "tokens from a cache, and shares" in wrong  # what a wrong salt shows alone
    assert "answers [" in wrong
    caught(SEED, wrong)


@pytest.mark.parametrize("model", MODELS)
def test_one_wrong_block_changes_the_answer(checkpoint, model):
    """Each block in turn is loaded from another one's place."""
    kv_transfer = offloading(
        64 << 20, spec_name="OneWrongBlockSpec", spec_module_path="faulty_memory_spec"
    )
    settings = {"enable_prefix_caching": False, "kv_transfer": kv_transfer}
    with engine(checkpoint(model), **settings) as llm:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        wanted, other = list(tokens(1, 200)), list(tokens(2, 40))
        (right,) = generate(llm, [wanted], 24)
        generate(llm, [other], 2)  # until everything is stored
        memory = get_kv_transfer_group().connector_worker.spec.memory
        answers = []
        while not answers or len(answers) < memory.blocks_in_load:
            answers += generate(llm, [wanted], 24)
    assert memory.loads == len(answers)
    for i, answer in enumerate(answers):
        assert answer.num_cached_tokens > 0
        assert answer.outputs[0].token_ids != right.outputs[0].token_ids, f"block {i}"


def test_published_release_fails(in_stock, caught):
    case, seed, finding = STOCK[RELEASE]
    printed = in_stock()
    assert finding in printed
    assert f"repeat: python -m tests.engine --seed {seed} --case {case}" in printed
    seconds = re.search(rf"{case}: \d+ requests in ([\d.]+) s", printed)[1]
    caught(seed, f"after {seconds} s of its own: {finding}")
