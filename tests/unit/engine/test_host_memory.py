from __future__ import annotations

import mmap

import pytest
import torch

from baton.engine.host_memory import SharedMemory, allocate


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 5_000_001])
def test_memory_is_zeroed_and_of_the_size_asked_for(num_bytes: int) -> None:
    memory = allocate(num_bytes)
    assert memory.dtype == torch.uint8
    assert memory.shape == (num_bytes,)
    assert not memory.any()


def test_views_keep_the_memory() -> None:
    view = allocate(4096)[64:].view(torch.float32)
    view.fill_(1.5)
    assert view.sum() == 1.5 * view.numel()


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes"):
        allocate(1 << 60)


def test_small_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert allocate(10).shape == (10,)


def test_shared_memory_is_the_same_for_all_who_map_it_and_outlives_its_descriptor() -> None:
    memory = SharedMemory.create(5_000_001)
    first, second = memory.map(), memory.map()
    assert first.shape == (5_000_001,)
    assert not first.any()
    memory.close()
    first[7] = 3
    assert second[7] == 3


def test_shared_memory_may_begin_inside_a_file() -> None:
    memory = SharedMemory.create(2 * mmap.PAGESIZE)
    part = SharedMemory(memory.fd, mmap.PAGESIZE, 10).map()
    part.fill_(9)
    assert memory.map()[mmap.PAGESIZE - 1 : mmap.PAGESIZE + 11].tolist() == [0, *[9] * 10, 0]
    memory.close()


def test_too_much_shared_memory_is_a_memory_error() -> None:
    memory = SharedMemory.create(1 << 60)
    with pytest.raises(MemoryError, match="bytes"):
        memory.map()
    memory.close()
