"""The prefill scheduler on a virtual clock: the same code as in production, with a cost model for a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import ManualClock
from baton.core.generation import SamplingParams
from baton.engine.block_pool import BlockPool
from prefill_worker.scheduler import MIN_LENGTH_RATIO, Prefill, PrefillLimits, PrefillScheduler

if TYPE_CHECKING:
    from baton.engine.batch import BatchPlan

BLOCK_SIZE = 16
LIMITS = PrefillLimits(max_num_batched_tokens=128, max_num_seqs=64, oldest_share=0.25)
STEP_S, TOKEN_S = 0.005, 0.001


@dataclass
class Simulation:
    """Runs arrivals through a scheduler; a step costs a fixed time and a time a token. Decode takes over at once.

    A step has `num_parts`, between which other steps may interrupt it.
    """

    limits: PrefillLimits = LIMITS
    num_blocks: int = 2048
    num_parts: int = 1
    first_token_s: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0

    def run(self, arrivals: list[tuple[float, int]]) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        self.scheduler = PrefillScheduler(self.pool, self.limits)
        self.pending = sorted((at_s, f"a{index}", num_tokens) for index, (at_s, num_tokens) in enumerate(arrivals))
        self.unfinished: dict[str, int] = {}
        # Tokens computed while an attempt was the oldest: its own, and those of others.
        self.own: dict[str, int] = {}
        self.others: dict[str, int] = {}
        while self.pending or self.unfinished:
            self.take_in()
            plan = self.scheduler.plan()
            if plan.slices:
                self.step(plan, self.num_parts)
            else:
                assert not self.unfinished, "work waits and nothing runs"
                self.clock.advance(self.pending[0][0] - self.clock.monotonic_s())
        self.pool.check_integrity()
        assert self.pool.num_used == 0

    def take_in(self) -> None:
        now_s = self.clock.monotonic_s()
        while self.pending and self.pending[0][0] <= now_s:
            _, attempt_id, num_tokens = self.pending.pop(0)
            self.scheduler.add(
                Prefill(attempt_id=attempt_id, token_ids=range(num_tokens), sampling=SamplingParams(), arrived_s=now_s)
            )
            self.unfinished[attempt_id] = num_tokens
        self.scheduler.start_waiting(now_s)

    def step(self, plan: BatchPlan, num_parts: int) -> None:
        plan.assert_fits(block_size=BLOCK_SIZE, num_blocks=self.num_blocks)
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len({piece.attempt_id for piece in plan.slices}) == len(plan.slices) <= self.limits.max_num_seqs
        oldest = next(iter(self.unfinished))
        of_oldest = sum(len(piece.token_ids) for piece in plan.slices if piece.attempt_id == oldest)
        self.own[oldest] = self.own.get(oldest, 0) + of_oldest
        self.others[oldest] = self.others.get(oldest, 0) + plan.num_tokens - of_oldest
        for part in range(num_parts):
            if part > 0:
                self.take_in()
                while (interrupt := self.scheduler.plan_interrupt(plan)).slices:
                    self.assert_may_interrupt(interrupt, plan)
                    self.step(interrupt, 1)
            self.clock.advance((STEP_S + TOKEN_S * plan.num_tokens) / num_parts)
        self.num_steps += 1
        for _, prefill in self.scheduler.commit(plan):
            self.first_token_s[prefill.attempt_id] = self.clock.monotonic_s() - prefill.arrived_s
            del self.unfinished[prefill.attempt_id]
            assert self.scheduler.release(prefill.attempt_id)

    def assert_may_interrupt(self, interrupt: BatchPlan, step: BatchPlan) -> None:
        shortest = min(self.unfinished[piece.attempt_id] for piece in step.slices)
        for piece in interrupt.slices:
            left = self.unfinished[piece.attempt_id] - piece.start_position
            assert left * MIN_LENGTH_RATIO <= shortest
            assert piece.attempt_id not in {other.attempt_id for other in step.slices}


arrivals_strategy = st.lists(
    st.tuples(st.floats(0, 5), st.one_of(st.integers(1, 120), st.integers(1, 4000))), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=arrivals_strategy,
    budget=st.integers(1, 600),
    share=st.floats(0.05, 1),
    max_num_seqs=st.integers(1, 8),
    num_parts=st.integers(1, 5),
)
def test_whatever_arrives_the_budget_holds_and_nobody_starves(arrivals, budget, share, max_num_seqs, num_parts):
    limits = PrefillLimits(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, oldest_share=share)
    simulation = Simulation(limits=limits, num_blocks=250, num_parts=num_parts)
    simulation.run(arrivals)
    assert len(simulation.first_token_s) == len(arrivals)
    others_per_token = 1 / share - 1
    for attempt_id, num_others in simulation.others.items():
        # Saved up before it became the oldest: no more than for a step of it. And a step that was begun ends.
        assert num_others <= others_per_token * (simulation.own[attempt_id] + budget) + 2 * budget


def test_a_chat_that_arrives_during_a_long_step_waits_for_a_part_of_it():
    chats = [(0.1 + 0.4 * index, 40 + 4 * index) for index in range(20)]
    simulation = Simulation(num_parts=30)
    simulation.run([(0.0, 7600), *chats])
    part_s = (STEP_S + TOKEN_S * LIMITS.max_num_batched_tokens) / simulation.num_parts
    for index, (_, num_tokens) in enumerate(chats, start=1):
        assert simulation.first_token_s[f"a{index}"] <= part_s + STEP_S + TOKEN_S * num_tokens + 1e-9


def test_without_parts_a_chat_waits_for_the_step_that_it_arrives_in():
    chats = [(0.1 + 0.4 * index, 40 + 4 * index) for index in range(20)]
    simulation = Simulation()
    simulation.run([(0.0, 7600), *chats])
    whole_step_s = STEP_S + TOKEN_S * LIMITS.max_num_batched_tokens
    for index, (_, num_tokens) in enumerate(chats, start=1):
        assert simulation.first_token_s[f"a{index}"] <= whole_step_s + STEP_S + TOKEN_S * num_tokens + 1e-9


def test_a_chat_does_not_interrupt_its_equals():
    simulation = Simulation(num_parts=30)
    simulation.run([(0.0, 100), (0.01, 90)])
    assert simulation.first_token_s["a0"] == pytest.approx(STEP_S + TOKEN_S * 100)


def test_a_flood_of_chats_does_not_starve_a_long_prompt():
    # 100 chats a second of 100 tokens each are ten times what the worker can compute.
    flood = [(0.01 * index, 100) for index in range(1500)]
    simulation = Simulation(num_blocks=20_000, num_parts=30)
    simulation.run([(0.0, 6400), *flood])
    # Three of four tokens are the chats', and each of their steps has at least 100.
    assert simulation.first_token_s["a0"] <= 4 * 6400 * TOKEN_S + (6400 / 128 + 3 * 6400 / 100 + 2) * STEP_S


def test_a_lone_prompt_gets_the_whole_budget():
    simulation = Simulation(num_parts=3)
    simulation.run([(0.0, 7600)])
    assert simulation.num_steps == -(-7600 // LIMITS.max_num_batched_tokens)


def test_a_full_pool_makes_wait_in_order_of_arrival():
    simulation = Simulation(num_blocks=100)
    simulation.run([(0.0, 1600), (0.001, 1600), (0.002, 10)])
    ended_s = {"a0": 0.0, "a1": 0.001, "a2": 0.002}
    ended_s = {
        attempt_id: arrived_s + simulation.first_token_s[attempt_id] for attempt_id, arrived_s in ended_s.items()
    }
    assert ended_s["a0"] < ended_s["a1"] < ended_s["a2"]
