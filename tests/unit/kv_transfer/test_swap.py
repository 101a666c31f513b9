from __future__ import annotations

import threading
import time

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from decode_worker.sequence import Swap
from decode_worker.swapper import ThreadSwapper
from kv_transfer import swap as swap_module
from kv_transfer.swap import SwapSpace

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")


@pytest.fixture
def pool() -> KVPool:
    made = KVPool(LAYOUT, 10)
    made.tensor.copy_(torch.randn(made.tensor.shape))
    return made


def swap(*, is_out: bool, block_ids: tuple[int, ...], slots: tuple[int, ...]) -> Swap:
    return Swap(attempt_id="a", is_out=is_out, block_ids=block_ids, slots=slots)


def test_blocks_come_back_to_the_bit_in_other_places(pool):
    space = SwapSpace(pool, 6)
    before = pool.tensor.clone()
    space.save([3, 4, 5, 9, 0], [5, 1, 2, 3, 0])
    assert torch.equal(pool.tensor, before)
    pool.tensor.zero_()
    space.restore([5, 1, 2, 3, 0], [1, 8, 7, 6, 2])
    for old, new in zip([3, 4, 5, 9, 0], [1, 8, 7, 6, 2], strict=True):
        assert torch.equal(pool.tensor[new], before[old])
    assert not pool.tensor[[0, 3, 4, 5, 9]].any()


def test_a_thread_copies_and_wakes(pool):
    woken = threading.Semaphore(0)
    swapper = ThreadSwapper(SwapSpace(pool, 4), woken.release)
    before = pool.tensor.clone()
    assert not swapper.has_done
    swapper.start(swap(is_out=True, block_ids=(2, 3), slots=(0, 1)))
    assert woken.acquire(timeout=10)
    assert swapper.has_done
    assert [(done.attempt_id, done.succeeded) for done in swapper.take_done()] == [("a", True)]
    pool.tensor.zero_()
    swapper.start(swap(is_out=False, block_ids=(7, 2), slots=(0, 1)))
    assert woken.acquire(timeout=10)
    swapper.close()
    assert torch.equal(pool.tensor[[7, 2]], before[[2, 3]])


def test_a_copy_that_breaks_is_told(pool, monkeypatch):
    def broken(*_):
        raise RuntimeError("no copy")

    monkeypatch.setattr(swap_module, "copy_on_cpu", broken)
    woken = threading.Event()
    swapper = ThreadSwapper(SwapSpace(pool, 4), woken.set)
    swapper.start(swap(is_out=True, block_ids=(2,), slots=(0,)))
    assert woken.wait(10)
    assert [done.succeeded for done in swapper.take_done()] == [False]
    swapper.close()


def test_a_long_copy_leaves_the_interpreter_to_others():
    big = KVPool(KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16"), 400)
    space = SwapSpace(big, 400)
    space.save(range(400), range(400))  # the pages are there now
    most_turns = 0
    for _ in range(200):  # others may have the cores that this thread waits for
        thread = threading.Thread(target=lambda: [space.save(range(400), range(400)) for _ in range(5)])
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
            time.sleep(0)
        most_turns = max(most_turns, turns)
        if most_turns > 20:
            break
    assert most_turns > 20


def test_memory_that_is_not_there_is_named(pool):
    with pytest.raises(StartupError, match="swap_bytes: cannot allocate"):
        SwapSpace(pool, 1 << 50)
