from __future__ import annotations

import mmap

import pytest
import torch

from baton.engine.host_memory import allocate


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
