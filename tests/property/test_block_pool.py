from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.block_pool import BlockPool, OutOfBlocksError

NUM_BLOCKS = 12
OWNERS = st.sampled_from(["a", "b", "c"])
NAMES = [bytes([number]) for number in range(6)]


class BlockPoolMachine(RuleBasedStateMachine):
    """The pool beside the simplest model of it: who holds which ids, which are published, which rest since when."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 16)
        self.held: dict[str, set[int]] = {}
        self.published: dict[bytes, int] = {}
        self.unused: list[int] = []  # published and nobody's, the longest unused first

    @property
    def all_held(self) -> set[int]:
        return set().union(*self.held.values())

    @rule(owner=OWNERS, num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, owner: str, num_blocks: int) -> None:
        num_free = NUM_BLOCKS - len(self.all_held)
        if num_blocks > num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(owner, num_blocks)
            return
        block_ids = self.pool.allocate(owner, num_blocks)
        assert len(set(block_ids)) == num_blocks
        assert not set(block_ids) & self.all_held
        assert set(block_ids) <= set(range(NUM_BLOCKS))
        num_evicted = max(0, num_blocks - (num_free - len(self.unused)))
        evicted, self.unused = self.unused[:num_evicted], self.unused[num_evicted:]
        assert set(block_ids) & {*evicted, *self.unused} == set(evicted)
        self.published = {name: block for name, block in self.published.items() if block not in evicted}
        self.held.setdefault(owner, set()).update(block_ids)

    @precondition(lambda self: self.all_held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(name for name, ids in self.held.items() if ids)))
        block_ids = data.draw(st.lists(st.sampled_from(sorted(self.held[owner])), unique=True))
        self.pool.free(owner, block_ids)
        self.release(owner, block_ids)

    def release(self, owner: str, block_ids: list[int]) -> None:
        self.held[owner] -= set(block_ids)
        known = set(self.published.values())
        self.unused += [block for block in reversed(block_ids) if block in known - self.all_held]

    @rule(owner=OWNERS, block_ids=st.lists(st.integers(-1, NUM_BLOCKS), min_size=1, max_size=3))
    def free_what_is_not_owned(self, owner: str, block_ids: list[int]) -> None:
        is_rightful = len(set(block_ids)) == len(block_ids) and set(block_ids) <= self.held.get(owner, set())
        if is_rightful:
            return
        with pytest.raises(AssertionError):
            self.pool.free(owner, block_ids)

    @precondition(lambda self: self.all_held - set(self.published.values()))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.all_held - set(self.published.values()))))
        owner = next(owner for owner, ids in self.held.items() if block in ids)
        known = self.published.get(name)
        if known in self.held[owner]:
            return  # chains never hold two blocks of one name
        assert self.pool.publish(owner, block, name) == (block if known is None else known)
        if known is None:
            self.published[name] = block
        else:
            self.take(owner, [known])
            self.release(owner, [block])

    @rule(owner=OWNERS, names=st.lists(st.sampled_from(NAMES), unique=True))
    def share(self, owner: str, names: list[bytes]) -> None:
        found = self.pool.find(names)
        expected = []
        for name in names:
            if name not in self.published:
                break
            expected.append(self.published[name])
        assert found == expected
        assert self.pool.num_free_beside(found) == NUM_BLOCKS - len(self.all_held | set(found))
        wanted = [block for block in found if block not in self.held.get(owner, set())]
        self.pool.share(owner, wanted)
        self.take(owner, wanted)

    def take(self, owner: str, block_ids: list[int]) -> None:
        self.held.setdefault(owner, set()).update(block_ids)
        self.unused = [block for block in self.unused if block not in block_ids]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.all_held)
        assert self.pool.num_free == NUM_BLOCKS - len(self.all_held)
        for owner, block_ids in self.held.items():
            assert self.pool.owned_by(owner) == block_ids
        for name in NAMES:
            assert self.pool.find([name]) == ([self.published[name]] if name in self.published else [])


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
