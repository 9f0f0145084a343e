"""The bed finds what is wrong on purpose."""

import pytest
from cases import BITTEN, STOCK
from checkpoints import MODELS
from engines import engine, generate, offloading
from environment import RELEASE
from workloads import tokens


@pytest.mark.parametrize("case", BITTEN)
@pytest.mark.parametrize("spec", ["SwapsTwoBlocksSpec", "LosesABlockSpec", "CopiesLateSpec"])
def test_faulty_backend_gives_wrong_answers(run, case, spec):
    assert run(case, spec=spec).wrong


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


def test_published_release_fails(in_stock):
    case, seed, finding = STOCK[RELEASE]
    printed = in_stock()
    assert finding in printed
    assert f"repeat: python -m tests.engine --seed {seed} --case {case}" in printed
