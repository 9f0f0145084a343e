"""The bed's backend, whose copies take a millisecond each: vLLM counts those with a time."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from host_memory_spec import HostMemorySpec


class TimedSpec(HostMemorySpec):
    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, Any]]:
        """v0.19.1: a handler for each direction."""
        for source, target, handler in super().get_handlers(kv_caches):
            way = (source.medium(), target.medium())
            _time(handler, transfer_time=1e-3, transfer_type=way)
            yield source, target, handler

    def get_worker(self, kv_caches: Any) -> Any:
        """v0.33.0: a worker for both."""
        worker = super().get_worker(kv_caches)
        _time(worker, transfer_time=1e-3)
        return worker


def _time(copies: Any, **times: Any) -> None:
    untimed = copies.get_finished
    copies.get_finished = lambda: [dataclasses.replace(result, **times) for result in untimed()]
