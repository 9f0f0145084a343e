"""Engines whose scheduler and workers are processes of their own."""

import asyncio

import pytest
from bed import Comparison, engine_settings, observed, sampling_params
from cases import CASES, PROCESSES, SEED
from engines import engine_arguments, hybrid_manager_is_on
from workloads import Request

pytestmark = pytest.mark.timeout(300)


def test_tensor_parallel(run):
    outcome = run(PROCESSES, processes=True, tensor_parallel_size=2)
    assert not outcome.failures, outcome.failures


# In mode 1 vLLM's CPU workers compile nothing, but they warm up, and on v0.33.0 only that
# makes the buffer for what a stage gets from the one before.
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1},
}


@pytest.mark.asyncio
async def test_asynchronous_engine_with_pipeline_stages(checkpoint, answers):
    """All at once, but for chats, some of which are broken off."""
    case = CASES[PROCESSES]
    script = [event for event in case.script(SEED) if isinstance(event, Request)]
    comparison = Comparison(answers(case, SEED))
    folder = checkpoint(case.model)
    with observed(case) as (outcome, ledger):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = engine_settings(case, SEED, folder, ledger, "HostMemorySpec") | STAGES
        arguments = AsyncEngineArgs(**engine_arguments(folder, **settings))
        llm = AsyncLLM.from_engine_args(arguments)
        outcome.hybrid_manager = hybrid_manager_is_on(llm.vllm_config)
        ended = {request.name: asyncio.Event() for request in script}

        async def ask(request: Request) -> None:
            if request.follows is not None:
                await ended[request.follows].wait()
            outputs = llm.generate(
                comparison.prompt(request), sampling_params(request), request.name
            )
            count = 0
            async for output in outputs:
                comparison.look_at(output)
                count += 1
                if request.abort_after is not None and count > request.abort_after:
                    await outputs.aclose()
                    break
            ended[request.name].set()

        try:
            await asyncio.gather(*map(ask, script))
        finally:
            llm.shutdown()
        outcome.wrong += comparison.wrong.values()
        outcome.wrong += comparison.cached_too_many.values()
        stayed = {request.name for request in script if request.abort_after is None}
        assert comparison.ended >= stayed
    assert not outcome.failures, outcome.failures
