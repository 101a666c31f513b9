"""Prefill workers of a simulation: the production scheduler over real block pools; a step takes what its costs say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.generation import SamplingParams
from baton.engine.block_pool import BlockPool
from prefill_worker.scheduler import Prefill, PrefillLimits, PrefillScheduler

if TYPE_CHECKING:
    from baton.engine.batch import BatchPlan
    from baton.sim.load import Costs

BLOCK_SIZE = 16
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Capacity of each worker of a role. `num_swap_blocks` is for decode workers."""

    num_blocks: int
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    oldest_share: float = 0.25
    num_swap_blocks: int = 0


class SimPrefill:
    """A prefill worker. Between `begin_step` and `end_step` a step runs, and in it others that interrupt it."""

    def __init__(self, size: WorkerSize, costs: Costs) -> None:
        self._pool = BlockPool(size.num_blocks, size.block_size)
        self._costs = costs
        self._scheduler = PrefillScheduler(
            self._pool,
            PrefillLimits(
                max_num_batched_tokens=size.max_num_batched_tokens,
                max_num_seqs=size.max_num_seqs,
                oldest_share=size.oldest_share,
            ),
        )
        self._plan: BatchPlan | None = None
        self._interrupt: BatchPlan | None = None
        self._held_up_s = 0.0

    def add(self, attempt_id: str, num_tokens: int, now_s: float) -> None:
        """Takes a prompt in."""
        self._scheduler.add(
            Prefill(attempt_id=attempt_id, token_ids=range(num_tokens), sampling=_GREEDY, arrived_s=now_s)
        )

    def begin_step(self, now_s: float) -> float | None:
        """How long the next step takes, in seconds; None when one runs or there is nothing to compute."""
        if self._plan is not None:
            return None
        self._scheduler.start_waiting(now_s)
        plan = self._scheduler.plan()
        if not plan.slices:
            return None
        self._plan = plan
        return self._duration_s(plan)

    def begin_interrupt(self, now_s: float) -> float | None:
        """How long what interrupts the step that runs takes, in seconds; None when nothing does."""
        if self._plan is None or self._interrupt is not None:
            return None
        self._scheduler.start_waiting(now_s)
        plan = self._scheduler.plan_interrupt(self._plan)
        if not plan.slices:
            return None
        self._interrupt = plan
        duration_s = self._duration_s(plan)
        self._held_up_s += duration_s
        return duration_s

    def end_interrupt(self) -> list[str]:
        """The attempts whose prompts are computed now."""
        assert self._interrupt is not None, "nothing interrupts"
        plan, self._interrupt = self._interrupt, None
        return self._commit(plan)

    def take_held_up_s(self) -> float:
        """By how much the end of the step that runs has moved since the last call, in seconds."""
        held_up_s, self._held_up_s = self._held_up_s, 0.0
        return held_up_s

    def end_step(self) -> list[str]:
        """The attempts whose prompts are computed now."""
        assert self._plan is not None, "no step runs"
        plan, self._plan = self._plan, None
        return self._commit(plan)

    def release(self, attempt_id: str) -> None:
        """Frees an attempt's blocks."""
        was_here = self._scheduler.release(attempt_id)
        assert was_here, f"{attempt_id} is not here"

    def assert_idle(self) -> None:
        """AssertionError unless no block is held."""
        self._pool.check_integrity()
        assert self._pool.num_used == 0, "blocks are held by nobody"

    def _duration_s(self, plan: BatchPlan) -> float:
        return self._costs.prefill_step_s + self._costs.prefill_token_s * plan.num_tokens

    def _commit(self, plan: BatchPlan) -> list[str]:
        return [prefill.attempt_id for _, prefill in self._scheduler.commit(plan)]
