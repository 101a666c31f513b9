"""The prefill scheduler on a virtual clock: the same code as in production, with a cost model for a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import ManualClock
from baton.core.generation import SamplingParams
from baton.engine.block_pool import BlockPool
from prefill_worker.scheduler import Prefill, PrefillLimits, PrefillScheduler

BLOCK_SIZE = 16
LIMITS = PrefillLimits(max_num_batched_tokens=512, max_num_seqs=64, guaranteed_tokens=128)


@dataclass
class Simulation:
    """Runs arrivals through a scheduler; a step costs a fixed time and a time a token. Decode takes over at once."""

    limits: PrefillLimits = LIMITS
    num_blocks: int = 2048
    step_s: float = 0.005
    token_s: float = 0.001
    first_token_s: dict[str, float] = field(default_factory=dict)
    steps_as_oldest: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0

    def run(self, arrivals: list[tuple[float, int]]) -> None:
        clock = ManualClock()
        pool = BlockPool(self.num_blocks, BLOCK_SIZE)
        scheduler = PrefillScheduler(pool, self.limits)
        pending = sorted((at_s, f"a{index}", num_tokens) for index, (at_s, num_tokens) in enumerate(arrivals))
        unfinished: list[str] = []
        lengths: dict[str, int] = {}
        while pending or unfinished:
            now_s = clock.monotonic_s()
            while pending and pending[0][0] <= now_s:
                _, attempt_id, num_tokens = pending.pop(0)
                scheduler.add(
                    Prefill(
                        attempt_id=attempt_id, token_ids=range(num_tokens), sampling=SamplingParams(), arrived_s=now_s
                    )
                )
                unfinished.append(attempt_id)
                lengths[attempt_id] = num_tokens
            scheduler.start_waiting(now_s)
            plan = scheduler.plan()
            if not plan.slices:
                assert not unfinished, "work waits and nothing runs"
                clock.advance(pending[0][0] - now_s)
                continue
            plan.assert_fits(block_size=BLOCK_SIZE, num_blocks=self.num_blocks)
            assert plan.num_tokens <= self.limits.max_num_batched_tokens
            assert len({piece.attempt_id for piece in plan.slices}) == len(plan.slices) <= self.limits.max_num_seqs
            oldest = unfinished[0]
            self.steps_as_oldest[oldest] = self.steps_as_oldest.get(oldest, 0) + 1
            clock.advance(self.step_s + self.token_s * plan.num_tokens)
            self.num_steps += 1
            for _, prefill in scheduler.commit(plan):
                self.first_token_s[prefill.attempt_id] = clock.monotonic_s() - prefill.arrived_s
                unfinished.remove(prefill.attempt_id)
                assert scheduler.release(prefill.attempt_id)
        pool.check_integrity()
        assert pool.num_used == 0
        for attempt_id, num_steps in self.steps_as_oldest.items():
            assert num_steps <= math.ceil(lengths[attempt_id] / self.limits.guaranteed_tokens)


arrivals_strategy = st.lists(
    st.tuples(st.floats(0, 5), st.one_of(st.integers(1, 120), st.integers(1, 4000))), min_size=1, max_size=25
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=arrivals_strategy,
    budget=st.integers(1, 600),
    share=st.floats(0.01, 1),
    max_num_seqs=st.integers(1, 8),
)
def test_whatever_arrives_the_budget_holds_and_nobody_starves(arrivals, budget, share, max_num_seqs):
    guaranteed = max(1, math.ceil(budget * share))
    limits = PrefillLimits(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, guaranteed_tokens=guaranteed)
    simulation = Simulation(limits=limits, num_blocks=250)
    simulation.run(arrivals)
    assert len(simulation.first_token_s) == len(arrivals)
    # Each attempt is the oldest for a bounded time, so all of them end within the sum of those times.
    assert simulation.num_steps <= sum(math.ceil(num_tokens / guaranteed) for _, num_tokens in arrivals)


def test_chats_are_computed_between_the_chunks_of_a_long_prompt():
    chats = [(0.1 + 0.4 * index, 40 + 4 * index) for index in range(20)]
    simulation = Simulation()
    simulation.run([(0.0, 7600), *chats])
    whole_step_s = simulation.step_s + simulation.token_s * LIMITS.max_num_batched_tokens
    for index, (_, num_tokens) in enumerate(chats, start=1):
        own_step_s = simulation.step_s + simulation.token_s * (num_tokens + LIMITS.guaranteed_tokens)
        # The step that it arrives in, then its own, which carries nothing of the long prompt but its guarantee.
        assert simulation.first_token_s[f"a{index}"] <= whole_step_s + own_step_s + 1e-9


def test_a_flood_of_chats_does_not_starve_a_long_prompt():
    # 100 chats a second of 100 tokens each are ten times what the worker can compute.
    flood = [(0.01 * index, 100) for index in range(1500)]
    simulation = Simulation(num_blocks=20_000, limits=LIMITS)
    simulation.run([(0.0, 6400), *flood])
    longest_step_s = simulation.step_s + simulation.token_s * LIMITS.max_num_batched_tokens
    assert simulation.first_token_s["a0"] <= math.ceil(6400 / LIMITS.guaranteed_tokens) * longest_step_s


def test_a_lone_prompt_gets_the_whole_budget():
    simulation = Simulation()
    simulation.run([(0.0, 7600)])
    assert simulation.num_steps == math.ceil(7600 / LIMITS.max_num_batched_tokens)


def test_a_full_pool_makes_wait_in_order_of_arrival():
    simulation = Simulation(num_blocks=100)
    simulation.run([(0.0, 1600), (0.001, 1600), (0.002, 10)])
    ended_s = {"a0": 0.0, "a1": 0.001, "a2": 0.002}
    ended_s = {
        attempt_id: arrived_s + simulation.first_token_s[attempt_id] for attempt_id, arrived_s in ended_s.items()
    }
    assert ended_s["a0"] < ended_s["a1"] < ended_s["a2"]
