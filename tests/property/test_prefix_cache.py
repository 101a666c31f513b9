"""Shared blocks over the production scheduler and pool, with a memory that remembers what was written where.

Whatever comes, is cancelled, fails and is released in whatever order: a step reads in each earlier position what its
own prompt has there, a reader under a lease does so until the end, and nobody writes where another one reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.generation import LogprobOptions, SamplingParams
from baton.core.prefixes import PrefixDigests
from baton.engine.block_pool import BlockPool
from prefill_worker.scheduler import Prefill, PrefillLimits, PrefillScheduler

if TYPE_CHECKING:
    from baton.engine.batch import BatchPlan

NUM_BLOCKS = 14
BLOCK_SIZE = 3
LIMITS = PrefillLimits(max_num_batched_tokens=7, max_num_seqs=5, oldest_share=0.25)
GREEDY = SamplingParams(temperature=0.0)
# Few beginnings and short tails: most prompts share something.
HEADS = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9, 1], [2] * 9]
PROMPTS = st.one_of(
    st.sampled_from(HEADS),
    st.builds(
        lambda head, tail: [*head, *tail],
        st.sampled_from([[], *HEADS]),
        st.lists(st.integers(1, 2), min_size=1, max_size=8),
    ),
)


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = PrefillScheduler(self.pool, LIMITS, PrefixDigests(BLOCK_SIZE))
        # What a position's keys and values depend on: the salt and all tokens up to it.
        self.memory: dict[tuple[int, int], object] = {}
        self.prefills: dict[str, Prefill] = {}
        self.held: set[str] = set()
        self.tables: dict[str, list[int]] = {}
        self.number = 0

    def contents(self, prefill: Prefill, position: int) -> object:
        return prefill.cache_salt, tuple(prefill.token_ids[: position + 1])

    def stored(self, prefill: Prefill, position: int) -> object:
        return self.memory.get((prefill.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE))

    @rule(token_ids=PROMPTS, salt=st.sampled_from(["", "a"]), scored=st.booleans())
    def add(self, token_ids: list[int], salt: str, scored: bool) -> None:
        self.number += 1
        prefill = Prefill(
            attempt_id=f"a{self.number}",
            token_ids=token_ids,
            sampling=GREEDY,
            arrived_s=0.0,
            logprobs=LogprobOptions(prompt_top=0 if scored and len(token_ids) % 3 == 0 else None),
            cache_salt=salt,
        )
        self.prefills[prefill.attempt_id] = prefill
        self.scheduler.add(prefill)

    def write(self, plan: BatchPlan) -> None:
        written: set[tuple[int, int]] = set()
        for piece in plan.slices:
            prefill = self.prefills[piece.attempt_id]
            for position in range(piece.start_position, piece.end_position):
                place = piece.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert place not in written, "two slices write to one place"
                written.add(place)
                self.memory[place] = self.contents(prefill, position)

    def read(self, plan: BatchPlan) -> None:
        if plan.slices:
            plan.assert_fits(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        for piece in plan.slices:
            prefill = self.prefills[piece.attempt_id]
            assert prefill.looks_up or prefill.num_cached_tokens == 0
            for position in range(piece.start_position):
                assert self.stored(prefill, position) == self.contents(prefill, position)

    def commit(self, plan: BatchPlan) -> None:
        for _, prefill in self.scheduler.commit(plan):
            self.held.add(prefill.attempt_id)
            self.tables[prefill.attempt_id] = list(prefill.block_table)

    @rule(fails=st.booleans(), is_interrupted=st.booleans(), cancels=st.data())
    def step(self, fails: bool, is_interrupted: bool, cancels: st.DataObject) -> None:
        self.scheduler.start_waiting(0.0)
        plan = self.scheduler.plan()
        self.read(plan)
        self.write(plan)
        if plan.slices and is_interrupted:
            self.scheduler.start_waiting(0.0)
            interrupt = self.scheduler.plan_interrupt(plan)
            self.read(interrupt)
            self.write(interrupt)
            self.commit(interrupt)
            self.read(plan)
        if plan.slices and fails:
            # What a failed step has written is worth nothing.
            for piece in plan.slices:
                for position in range(piece.start_position, piece.end_position):
                    self.memory[piece.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE] = "broken"
                self.end(piece.attempt_id)
            return
        running = sorted({piece.attempt_id for piece in plan.slices})
        for attempt_id in cancels.draw(st.lists(st.sampled_from(running), unique=True, max_size=1)) if running else ():
            self.end(attempt_id)
        self.commit(plan)

    @precondition(lambda self: self.prefills)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.prefills))))

    def end(self, attempt_id: str) -> None:
        assert self.scheduler.release(attempt_id)
        del self.prefills[attempt_id]
        self.held.discard(attempt_id)
        self.tables.pop(attempt_id, None)

    @invariant()
    def a_reader_finds_its_whole_prompt(self) -> None:
        for attempt_id in self.held:
            prefill = self.prefills[attempt_id]
            assert prefill.block_table == self.tables[attempt_id]
            assert self.pool.owned_by(attempt_id) == set(prefill.block_table)
            for position in range(len(prefill.token_ids)):
                assert self.stored(prefill, position) == self.contents(prefill, position)

    @invariant()
    def nothing_is_lost_and_no_end_outlives_its_beginning(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(
            set().union(*(set(each.block_table) for each in self.prefills.values()), set())
        )
        # A chain's names are known from its start on, without a gap: an end is given up before what it builds on.
        for prefill in self.prefills.values():
            known = [bool(self.pool.find([name])) for name in prefill.block_names]
            assert known == sorted(known, reverse=True)

    def teardown(self) -> None:
        for attempt_id in list(self.prefills):
            self.end(attempt_id)
        self.scheduler.check_integrity()


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
