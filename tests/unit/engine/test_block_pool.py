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


def test_published_blocks_are_found_shared_and_free_only_after_their_last_owner():
    pool = BlockPool(4, 16)
    blocks = pool.allocate("a", 3)
    assert [pool.publish("a", block, name) for block, name in zip(blocks, (b"0", b"1"), strict=False)] == blocks[:2]
    assert pool.find([b"0", b"1", b"2"]) == blocks[:2]
    assert pool.find([b"2", b"0"]) == []
    pool.share("b", blocks[:1])
    pool.free("a", blocks)
    assert (pool.num_used, pool.num_free) == (1, 3)
    assert (pool.num_free_beside(blocks[:1]), pool.num_free_beside(blocks[:2])) == (3, 2)
    pool.free("b", blocks[:1])
    assert pool.num_free == 4
    assert pool.find([b"0", b"1"]) == blocks[:2]
    pool.check_integrity()


def test_memory_is_taken_from_blank_blocks_then_from_what_was_not_used_for_longest_ends_of_chains_first():
    pool = BlockPool(6, 16)
    blank = set(range(6))
    chains = {}
    for owner in "ab":
        chains[owner] = pool.allocate(owner, 2)
        for index, block in enumerate(chains[owner]):
            pool.publish(owner, block, f"{owner}{index}".encode())
        blank -= set(chains[owner])
    pool.free("a", chains["a"])
    pool.free("b", chains["b"])
    pool.share("again", chains["a"])
    pool.free("again", chains["a"])
    assert set(pool.allocate("c", 2)) == blank
    given = [pool.allocate("c", 1)[0] for _ in range(4)]
    assert given == [*reversed(chains["b"]), *reversed(chains["a"])]
    assert pool.find([b"a0"]) == pool.find([b"b0"]) == []
    pool.check_integrity()


def test_what_is_known_already_is_published_once():
    pool = BlockPool(2, 16)
    (first,), (second,) = pool.allocate("a", 1), pool.allocate("b", 1)
    assert pool.publish("a", first, b"x") == pool.publish("b", second, b"x") == first
    assert pool.owned_by("b") == {first}
    assert pool.num_free == 1
    pool.check_integrity()


def test_only_blocks_that_nobody_else_can_read_may_be_written():
    pool = BlockPool(3, 16)
    mine, shared = pool.allocate("a", 2)
    pool.assert_private("a", [mine, shared])
    pool.publish("a", shared, b"x")
    for owner, block in (("a", shared), ("b", mine), ("a", 2)):
        with pytest.raises(AssertionError, match="writes into block"):
            pool.assert_private(owner, [block])
    with pytest.raises(AssertionError, match="not published"):
        pool.share("b", [mine])
    pool.share("b", [shared])
    with pytest.raises(AssertionError, match="own a block twice"):
        pool.share("b", [shared])
