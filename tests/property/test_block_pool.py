from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 12
OWNERS = st.sampled_from(["a", "b", "c"])


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool beside the simplest model of it: who holds which ids."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.held: dict[str, set[int]] = {}

    @property
    def all_held(self) -> set[int]:
        return set().union(*self.held.values())

    @rule(owner=OWNERS, num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, owner: str, num_blocks: int) -> None:
        if num_blocks > NUM_BLOCKS - len(self.all_held):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(owner, num_blocks)
            return
        block_ids = self.pool.allocate(owner, num_blocks)
        assert len(set(block_ids)) == num_blocks
        assert not set(block_ids) & self.all_held
        assert set(block_ids) <= set(range(NUM_BLOCKS))
        self.held.setdefault(owner, set()).update(block_ids)

    @precondition(lambda self: self.all_held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(name for name, ids in self.held.items() if ids)))
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.held[owner])), unique=True))
        self.pool.free(owner, block_ids)
        self.held[owner] -= set(block_ids)

    @rule(owner=OWNERS, block_ids=st.lists(st.integers(-1, NUM_BLOCKS), min_size=1, max_size=3))
    def free_what_is_not_owned(self, owner: str, block_ids: list[int]) -> None:
        is_rightful = len(set(block_ids)) == len(block_ids) and set(block_ids) <= self.held.get(owner, set())
        if is_rightful:
            return
        with pytest.raises(AssertionError):
            self.pool.free(owner, block_ids)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.all_held)
        assert self.pool.num_free == NUM_BLOCKS - len(self.all_held)
        for owner, block_ids in self.held.items():
            assert self.pool.owned_by(owner) == block_ids


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
