"""An offloading backend in ordinary host memory, for engines that run on the CPU.

vLLM's own copies blocks with CUDA. This one takes its place through the connector's
extension point, and leaves everything else (scheduling, the manager, its sizes) to vLLM:

    "kv_connector_extra_config": {
        "spec_name": "HostMemorySpec", "spec_module_path": "host_memory_spec",
        "cpu_bytes_to_use": ...
    }

Copies are done when they are submitted, and every id is checked first. A chunk is what the
manager hands out: a page for each of `blocks_per_chunk` consecutive blocks of one KV cache
group, in each tensor.
"""

from collections.abc import Iterator

import torch
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

try:
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

    ONE_WORKER = True  # v0.33.0: a spec makes one worker for both directions
except ImportError:
    from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
    from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult

    ONE_WORKER = False  # v0.19.1: a handler for each


class HostMemory:
    """The host's copy of the KV cache tensors, and the copying."""

    def __init__(self, kv_caches, blocks_per_chunk: int, num_chunks: int):
        self.blocks_per_chunk = blocks_per_chunk
        # the bytes that count of each tensor's pages, for every group
        self.pages = [
            {ref.tensor_idx: ref.page_size_bytes for ref in refs}
            for refs in kv_caches.group_data_refs
        ]
        self.gpu = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        self.host = [
            torch.zeros(num_chunks, blocks_per_chunk, tensor.shape[1], dtype=torch.int8)
            for tensor in self.gpu
        ]

    def store(self, blocks, chunks) -> int:
        """Copy blocks of the KV cache into chunks; the number of bytes copied."""
        copied = 0
        for tensor, page, block, chunk, place in self._pages(blocks, chunks):
            self.host[tensor][chunk, place, :page] = self.gpu[tensor][block, :page]
            copied += page
        return copied

    def load(self, chunks, blocks) -> int:
        """Copy chunks into blocks of the KV cache; the number of bytes copied."""
        copied = 0
        for tensor, page, block, chunk, place in self._pages(blocks, chunks):
            self.gpu[tensor][block, :page] = self.host[tensor][chunk, place, :page]
            copied += page
        return copied

    def _pages(self, blocks, chunks) -> Iterator[tuple[int, int, int, int, int]]:
        """Each page of a transfer: tensor, bytes, block, chunk and place in the chunk."""
        block_ids = iter(blocks.block_ids.tolist())
        chunk_ids = iter(chunks.block_ids.tolist())
        if len(blocks.group_sizes) != len(self.pages):
            raise ValueError(
                f"a transfer of {len(blocks.group_sizes)} KV cache groups,"
                f" where there are {len(self.pages)}"
            )
        for group, (size, pages) in enumerate(zip(blocks.group_sizes, self.pages)):
            if blocks.block_indices is not None:
                place = blocks.block_indices[group] % self.blocks_per_chunk
            else:  # the last block ends a chunk
                place = -size % self.blocks_per_chunk
            chunk = None
            for _ in range(size):
                if chunk is None or place == self.blocks_per_chunk:
                    place = 0 if chunk is not None else place
                    chunk = self._check("chunk", next(chunk_ids, None), 0, self.host[0])
                block = self._check("block", next(block_ids), 1, self.gpu[0])
                for tensor, page in pages.items():
                    yield tensor, page, block, chunk, place
                place += 1
        if next(chunk_ids, None) is not None:
            raise ValueError("a transfer names more chunks than its blocks fill")

    @staticmethod
    def _check(what: str, number: int | None, first: int, pool: torch.Tensor) -> int:
        if number is None:
            raise ValueError("a transfer names fewer chunks than its blocks fill")
        if not first <= number < len(pool):  # block 0 is vLLM's null block
            raise IndexError(f"{what} {number} is not one of {first} to {len(pool) - 1}")
        return number


if ONE_WORKER:

    class HostMemorySpec(CPUOffloadingSpec):
        def get_worker(self, kv_caches):
            if self._worker is None:
                memory = HostMemory(kv_caches, self.blocks_per_chunk, self.num_chunks)
                self._worker = HostMemoryWorker(memory)
            return self._worker

    class HostMemoryWorker(OffloadingWorker):
        def __init__(self, memory: HostMemory):
            self.memory = memory
            self.finished: list[TransferResult] = []

        def submit_store(self, job_id, src_spec, dst_spec) -> bool:
            return self._finish(job_id, self.memory.store(src_spec, dst_spec))

        def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool:
            return self._finish(job_id, self.memory.load(src_spec, dst_spec))

        def _finish(self, job_id: int, num_bytes: int) -> bool:
            self.finished.append(TransferResult(job_id, True, num_bytes))
            return True

        def get_finished(self) -> list[TransferResult]:
            finished, self.finished = self.finished, []
            return finished

        def wait(self, job_ids) -> None:
            pass

else:

    class HostMemorySpec(CPUOffloadingSpec):
        def get_handlers(self, kv_caches):
            if self._handlers is None:
                self._handlers = HostMemory(kv_caches, self.block_size_factor, self.num_blocks)
            memory = self._handlers
            yield GPULoadStoreSpec, CPULoadStoreSpec, HostMemoryHandler(memory.store)
            yield CPULoadStoreSpec, GPULoadStoreSpec, HostMemoryHandler(memory.load)

    class HostMemoryHandler(OffloadingHandler):
        def __init__(self, copy):
            self.copy = copy
            self.finished: list[TransferResult] = []

        def transfer_async(self, job_id, spec) -> bool:
            self.finished.append(TransferResult(job_id, True, self.copy(*spec)))
            return True

        def get_finished(self) -> list[TransferResult]:
            finished, self.finished = self.finished, []
            return finished

        def wait(self, job_ids) -> None:
            pass
