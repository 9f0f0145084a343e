"""The offloading backend of these tests, without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch


@pytest.fixture
def make_memory(tmp_path):
    """Host memory for two chunks, of a KV cache with four blocks of eight bytes."""
    from host_memory_spec import Hostility, HostMemory

    def make(blocks_per_chunk=1, **hostility):
        cache = SimpleNamespace(
            tensor=torch.arange(32, dtype=torch.int8).view(4, 8), page_size_bytes=8
        )
        page = SimpleNamespace(tensor_idx=0, page_size_bytes=8)
        caches = SimpleNamespace(tensors=[cache], group_data_refs=[[page]])
        hostility = Hostility(ledger=str(tmp_path), **hostility)
        return HostMemory(caches, blocks_per_chunk, num_chunks=2, hostility=hostility)

    return make


@pytest.fixture
def ledger(tmp_path):
    """A function that gives the entries of a kind."""
    from host_memory_spec import Ledger

    def entries(kind):
        return [entry for entry in Ledger.read(tmp_path) if entry["kind"] == kind]

    return entries


def ids(*numbers, first=0):
    return SimpleNamespace(
        block_ids=np.array(numbers), group_sizes=[len(numbers)], block_indices=[first]
    )


def problems(ledger):
    return [entry["text"] for entry in ledger("problem")]


def test_keeps_what_is_stored(make_memory, ledger):
    memory = make_memory()
    before = memory.gpu[0].clone()
    memory.store(1, ids(3, 1), ids(0, 1))
    memory.wait(True, {1})
    memory.hand_out([1, 3])
    memory.load(2, ids(1, 0), ids(1, 3))
    assert not torch.equal(memory.gpu[0][[1, 3]], before[[1, 3]])
    (result,) = memory.poll(False)
    assert (result.job_id, result.success, result.transfer_size) == (2, True, 16)
    assert torch.equal(memory.gpu[0], before)
    assert [entry["blocks"] for entry in ledger("store") + ledger("load")] == [[2], [2]]
    assert not problems(ledger)


def test_reads_at_the_last_moment(make_memory):
    memory = make_memory(delay=(3, 3))
    memory.store(1, ids(2), ids(0))
    assert [len(memory.poll(True)) for _ in range(3)] == [0, 0, 0]
    memory.gpu[0][2] = 99
    assert len(memory.poll(True)) == 1
    assert torch.all(memory.host[0][0] == 99)


def test_starts_in_the_middle_of_a_chunk(make_memory):
    memory = make_memory(blocks_per_chunk=3)
    memory.store(1, ids(1, 2, first=5), ids(0, 1))
    memory.wait(True, {1})
    assert torch.equal(memory.host[0][0, 2], memory.gpu[0][1])
    assert torch.equal(memory.host[0][1, 0], memory.gpu[0][2])


def test_a_failed_copy_leaves_poison(make_memory):
    memory = make_memory(fail_every=2)
    for job, block in ((1, 1), (2, 2)):
        memory.store(job, ids(block), ids(job - 1))
    assert [result.success for result in memory.poll(True)] == [True, False]
    assert torch.all(memory.host[0][1] == memory.host[0][1, 0, 0])


@pytest.mark.parametrize(
    ("block", "chunk", "message"),
    [
        (4, 0, "store 1: block 4 is not one of 1 to 3"),
        (0, 0, "store 1: block 0 is not one of 1 to 3"),
        (1, 2, "store 1: chunk 2 is not one of 0 to 1"),
        (1, -1, "store 1: chunk -1 is not one of 0 to 1"),
    ],
)
def test_notices_impossible_ids(make_memory, ledger, block, chunk, message):
    memory = make_memory()
    memory.store(1, ids(block), ids(chunk))
    assert problems(ledger) == [message]


def test_notices_too_many_and_too_few_chunks(make_memory, ledger):
    memory = make_memory()
    memory.store(1, ids(1), ids(0, 1))
    memory.store(2, ids(1, 2), ids(0))
    assert problems(ledger)[0] == "store 1 names too many chunks"
    assert problems(ledger)[1] == "store 2 names too few chunks"


def test_notices_copies_of_poison(make_memory, ledger):
    memory = make_memory()
    memory.load(1, ids(1), ids(3))
    memory.poll(False)
    memory.hand_out([2])
    memory.store(2, ids(2), ids(0))
    memory.poll(True)
    assert problems(ledger) == [
        "load 1 copies chunk 1 of group 0, not wholly written",
        "store 2 copies block 2 of group 0, not wholly written",
    ]


def test_notices_two_users_of_a_block(make_memory, ledger):
    memory = make_memory(delay=(5, 5))
    memory.store(1, ids(1), ids(0))
    memory.load(2, ids(0), ids(2))
    memory.hand_out([1, 2])
    assert problems(ledger) == [
        "load 2 and store 1 use chunk 0 at once",
        "store 1 still reads block 1: it has a new owner",
        "load 2 still writes block 2: it has a new owner",
    ]
