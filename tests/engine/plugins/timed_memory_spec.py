"""Host memory whose copies are counted in vLLM's metrics, as CUDA's are; and one that dies."""

import os
import time

from host_memory_spec import Copy, HostMemory, HostMemorySpec


class Timed(HostMemory):
    """Says how long its copies took, without which vLLM does not count them."""

    def perform(self, copy: Copy) -> int:
        start = time.perf_counter()
        moved = super().perform(copy)
        self.seconds = time.perf_counter() - start
        return moved

    def poll(self, is_store: bool) -> list:
        results = super().poll(is_store)
        for result in results:
            result.transfer_time = self.seconds
            if hasattr(result, "transfer_type"):  # v0.33.0 knows it from the call
                result.transfer_type = ("GPU", "CPU") if is_store else ("CPU", "GPU")
        return results


class DiesOnLoad(Timed):
    """The process is gone at the first load, without a word."""

    def perform(self, copy: Copy) -> int:
        if not copy.is_store:
            os._exit(139)
        return super().perform(copy)


class TimedSpec(HostMemorySpec):
    memory_class = Timed


class DiesOnLoadSpec(HostMemorySpec):
    memory_class = DiesOnLoad
