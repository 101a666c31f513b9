from __future__ import annotations

import pytest

from baton.core.errors import ResourceExhaustedError
from baton.engine.block_pool import BlockPool, OutOfBlocksError


def test_blocks_are_distinct_and_counted():
    pool = BlockPool(8, 16)
    first, second = pool.allocate("a", 3), pool.allocate("b", 5)
    assert sorted(first + second) == list(range(8))
    assert (pool.num_free, pool.num_used) == (0, 8)
    assert pool.owned_by("a") == set(first)


def test_a_full_pool_refuses_and_keeps_what_it_has():
    pool = BlockPool(4, 16)
    pool.allocate("a", 3)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks are needed and 1 are free") as refusal:
        pool.allocate("b", 2)
    assert isinstance(refusal.value, ResourceExhaustedError)
    assert refusal.value.reason == "OUT_OF_BLOCKS"
    assert pool.num_free == 1
    pool.check_integrity()


def test_freed_blocks_come_back():
    pool = BlockPool(4, 16)
    blocks = pool.allocate("a", 4)
    pool.free("a", blocks[1:3])
    assert sorted(pool.allocate("b", 2)) == sorted(blocks[1:3])


def test_a_request_for_no_blocks_never_fails():
    pool = BlockPool(1, 16)
    pool.allocate("a", 1)
    assert pool.allocate("b", 0) == []
    pool.free("b", [])


@pytest.mark.parametrize("wrong", [["mine", "mine"], ["mine", "others"], ["mine", "free"], ["unknown"]])
def test_a_free_that_is_not_the_owners_is_a_bug_and_frees_nothing(wrong):
    pool = BlockPool(4, 16)
    ids = {"mine": pool.allocate("a", 1)[0], "others": pool.allocate("b", 1)[0], "free": 3, "unknown": 99}
    with pytest.raises(AssertionError):
        pool.free("a", [ids[name] for name in wrong])
    assert pool.num_used == 2
    pool.check_integrity()


def test_an_old_attempt_cannot_free_blocks_of_a_new_one():
    pool = BlockPool(1, 16)
    blocks = pool.allocate("attempt-1", 1)
    pool.free("attempt-1", blocks)
    assert pool.allocate("attempt-2", 1) == blocks
    with pytest.raises(AssertionError, match="attempt-1 frees block 0, which belongs to attempt-2"):
        pool.free("attempt-1", blocks)
