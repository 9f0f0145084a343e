"""What is kept: the product's policy, parts of it, and others to compare with.

Parts are switched off from outside. That leans on names inside the connector; where one is
gone, there is an error that says so.
"""

from collections.abc import Callable
from typing import Any

from .engine import Engine


def options(policy: str) -> dict[str, Any]:
    """What the engine's set-up needs to know of a policy."""
    if policy == "simple":
        return {"connector": "SimpleCPUOffloadConnector"}
    if policy == "answers":
        return {"connector_options": {"offload_prompt_only": False}}
    return {}


def change(policy: str, engine: Engine) -> None:
    """Make an engine follow a policy."""
    for part in _PARTS[policy]:
        part(engine.connector.connector_scheduler)


def _need(thing: Any, *names: str) -> None:
    for name in names:
        if not hasattr(thing, name):
            raise RuntimeError(
                f"{type(thing).__name__} has no {name} any more: bring "
                "benchmarks/inside/policies.py in line with the connector"
            )


def _no_checkpoints(scheduler: Any) -> None:
    _need(scheduler.manager, "prepare_store_spare")
    scheduler.manager.prepare_store_spare = lambda block_hashes: None


def _no_shared_prefixes(scheduler: Any) -> None:
    _need(scheduler, "_find_resume_point", "_get_state")
    find = scheduler._find_resume_point

    def find_and_forget(state: Any) -> Any:
        before = set(state.points_to_store)
        found = find(state)
        state.points_to_store &= before
        return found

    scheduler._find_resume_point = find_and_forget


def _no_answer_ends(scheduler: Any) -> None:
    _need(scheduler, "request_finished", "_window_groups")
    finished = scheduler.request_finished

    def finished_without_window(request: Any) -> Any:
        groups, scheduler._window_groups = scheduler._window_groups, []
        try:
            return finished(request)
        finally:
            scheduler._window_groups = groups

    scheduler.request_finished = finished_without_window


def _no_prompt_ends(scheduler: Any) -> None:
    _need(scheduler, "get_num_new_matched_tokens", "_get_state")
    look_up = scheduler.get_num_new_matched_tokens

    def look_up_and_forget(request: Any, num_computed_tokens: int) -> Any:
        found = look_up(request, num_computed_tokens)
        last = request.num_tokens - 1
        last -= last % scheduler.common_chunk_size
        scheduler._get_state(request).points_to_store.discard(last)
        return found

    scheduler.get_num_new_matched_tokens = look_up_and_forget


def _everything(scheduler: Any) -> None:
    """Store every block of every layer, and call it used whenever its prefix is."""
    _need(
        scheduler,
        *("_store", "_store_full_chunks", "_touch_stored", "_start_store_job", "_learn_from"),
    )
    scheduler._learn_from = lambda state, num_tokens: None
    look_up, finished = scheduler.get_num_new_matched_tokens, scheduler.request_finished
    done: dict[str, int] = {}

    def store(state: Any, num_tokens: int, is_last: bool = False) -> None:
        if scheduler._num_held_blocks > scheduler._max_held_blocks:
            return
        scheduler._update_keys(state)
        scheduler._store_full_chunks(state, num_tokens)
        scheduler._touch_stored(state)
        request = state.request
        start = done.get(request.request_id, 0)
        done[request.request_id] = num_tokens
        table = scheduler._get_block_table(request)
        chunks = {}
        for group in scheduler._window_groups:
            factor, size = group.blocks_per_chunk, group.chunk_size
            first, last = start // size, num_tokens // size
            keys = group.chunk_keys(request.block_hashes, first, last)
            for idx, key in enumerate(keys, first):
                blocks = table[group.group_idx][idx * factor : (idx + 1) * factor]
                if not any(block.is_null for block in blocks):
                    chunks[key] = (group, idx, blocks)
        output = scheduler.manager.prepare_store_after(state.prefix_keys, chunks)
        if output is not None and output.block_hashes_to_store:
            scheduler._start_store_job(request, chunks, output)

    def look_up_all(request: Any, num_computed_tokens: int) -> Any:
        for group in scheduler._window_groups:
            number = request.num_tokens // group.chunk_size
            scheduler.manager.touch(group.chunk_keys(request.block_hashes, 0, number))
        return look_up(request, num_computed_tokens)

    def forget(request: Any) -> Any:
        result = finished(request)
        done.pop(request.request_id, None)
        return result

    scheduler._store = store
    scheduler.get_num_new_matched_tokens = look_up_all
    scheduler.request_finished = forget


_PARTS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "product": (),
    "simple": (),
    # v0.33.0 stores prompts only, unless told otherwise.
    "answers": (),
    "everything": (_everything,),
    "no checkpoints": (_no_checkpoints,),
    "no shared prefixes": (_no_shared_prefixes,),
    "no answer ends": (_no_answer_ends,),
    "no prompt ends": (_no_prompt_ends,),
    "prompt ends only": (_no_checkpoints, _no_shared_prefixes, _no_answer_ends),
}
