"""What an installed vLLM with the series does, and the published one does not.

Nothing here needs a GPU or a model: vLLM's own classes are asked.
"""

import importlib
from collections.abc import Callable, Iterator

CONDITIONS: list[Callable[[], None]] = []
GIB = 1 << 30


class Unmet(Exception):
    """A condition is not met; the message says what was found."""


def check() -> Iterator[tuple[str, str | None]]:
    """Each condition in words, and what is wrong, or None."""
    for condition in CONDITIONS:
        text = " ".join((condition.__doc__ or "").split()).rstrip(".")
        try:
            condition()
        except Unmet as error:
            yield text, str(error)
        except Exception as error:  # whatever the release as published does instead
            yield text, f"{type(error).__name__}: {error}"
        else:
            yield text, None


def _condition(function: Callable[[], None]) -> Callable[[], None]:
    CONDITIONS.append(function)
    return function


def _connector():
    name = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
    return importlib.import_module(name).OffloadingConnector


@_condition
def _() -> None:
    """Sizes are understood with their units."""
    found = _connector().resolve_extra_config({"cpu_bytes_to_use": "120GiB"})
    if found["cpu_bytes_to_use"] != 120 * GIB:
        raise Unmet(f"120GiB is read as {found['cpu_bytes_to_use']!r}")


@_condition
def _() -> None:
    """A key that nobody reads is an error that names it and what to use instead."""
    try:
        _connector().resolve_extra_config({"cpu_bytes_to_use": GIB, "num_cpu_blocks": 1000})
    except ValueError as error:
        if "num_cpu_blocks" in str(error) and "cpu_bytes_to_use" in str(error):
            return
        raise Unmet(f"the error does not say it: {error}") from None
    raise Unmet("num_cpu_blocks is accepted")


@_condition
def _() -> None:
    """The connector works with the hybrid KV cache manager on."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    if not base.supports_hma(_connector()):
        raise Unmet("it does not")


@_condition
def _() -> None:
    """The log shows the KV transfer settings, and no secrets."""
    from vllm.config import KVTransferConfig

    text = str(
        KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": GIB, "storage_password": "q7xk"},
        )
    )
    if str(GIB) not in text or "storage_password" not in text or "q7xk" in text:
        raise Unmet(f"it shows {text}")


@_condition
def _() -> None:
    """More host memory than the machine has is refused."""
    memory = importlib.import_module("vllm.v1.kv_offload.cpu.host_memory")
    limit = memory.MemoryLimit(memory.MACHINE, total=100 * GIB, available=80 * GIB)
    memory.check_memory_requests([memory.MemoryRequest("here", "boot", 70 * GIB, [limit])])
    try:
        memory.check_memory_requests([memory.MemoryRequest("here", "boot", 90 * GIB, [limit])])
    except ValueError:
        return
    raise Unmet("90 GiB of 80 GiB are granted")


@_condition
def _() -> None:
    """A transfer with impossible block ids is an error before a byte moves."""
    import numpy as np

    check_ids = _check_of_ids()
    check_ids(1, "CPU", np.array([0, 3]), 4)
    for wrong in (4, -1):
        try:
            check_ids(1, "CPU", np.array([0, wrong]), 4)
        except ValueError:
            continue
        raise Unmet(f"block {wrong} of 4 is accepted")


def _check_of_ids() -> Callable:
    """v0.19.1 has it with its handlers, v0.33.0 with its worker."""
    try:
        return importlib.import_module("vllm.v1.kv_offload.worker.cpu_gpu").check_block_ids
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")._check_ids
