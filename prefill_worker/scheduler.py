"""Which prompt chunks run in a step. Pure policy: no I/O, no torch, time passed in.

A prompt gets all its blocks before its first chunk, in order of arrival, so whatever started can finish. In a
step the oldest prompt has a guaranteed share of the token budget; the rest goes to the prompts with the least
left to compute. When a prompt ends in a step, the rest is not filled up with prompts that don't: a chat's
first token is not held up by a long prompt's bulk. So a prompt of n tokens ends at the latest
ceil(n / guaranteed) steps after it became the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.generation import NO_LOGPROBS
from baton.engine.batch import BatchPlan, ScoredIds, SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import LogprobOptions, SamplingParams
    from baton.engine.block_pool import BlockPool
    from baton.engine.token_rules import TokenRules


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What a step and the worker may hold. `guaranteed_tokens` of each step belong to the oldest prompt."""

    max_num_batched_tokens: int
    max_num_seqs: int
    guaranteed_tokens: int


@dataclass(slots=True, kw_only=True)
class Prefill:
    """One attempt inside the worker. Its blocks belong to the scheduler until `release`."""

    attempt_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    arrived_s: float
    rules: TokenRules | None = None
    logprobs: LogprobOptions = NO_LOGPROBS
    started_s: float = 0.0
    num_computed_tokens: int = 0
    num_chunks: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens


class PrefillScheduler:
    """Owns every attempt's blocks, from the first chunk to `release`."""

    def __init__(self, pool: BlockPool, limits: PrefillLimits) -> None:
        self._pool = pool
        self._limits = limits
        # Each in order of arrival. An attempt is in exactly one of the three.
        self._waiting: dict[str, Prefill] = {}
        self._running: dict[str, Prefill] = {}
        self._held: dict[str, Prefill] = {}

    @property
    def num_waiting(self) -> int:
        """Attempts without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Attempts whose prompt is being computed."""
        return len(self._running)

    @property
    def num_held(self) -> int:
        """Attempts whose prompt is computed and whose blocks wait for `release`."""
        return len(self._held)

    @property
    def has_step(self) -> bool:
        """Whether the next `plan` after `start_waiting` has something to run."""
        return bool(self._running) or self._can_start()

    def add(self, prefill: Prefill) -> None:
        """Puts an attempt behind all others."""
        self._waiting[prefill.attempt_id] = prefill

    def start_waiting(self, now_s: float) -> list[Prefill]:
        """Gives blocks to waiting attempts, strictly in order, and returns those that may run now."""
        started = []
        while self._can_start():
            prefill = next(iter(self._waiting.values()))
            prefill.block_table = self._pool.allocate(prefill.attempt_id, self._num_blocks(prefill))
            prefill.started_s = now_s
            del self._waiting[prefill.attempt_id]
            self._running[prefill.attempt_id] = prefill
            started.append(prefill)
        return started

    def plan(self) -> BatchPlan:
        """The next step; without slices when nothing can run."""
        if not self._running:
            return BatchPlan(slices=())
        oldest = next(iter(self._running.values()))
        chunks = {oldest.attempt_id: min(oldest.num_remaining_tokens, self._limits.guaranteed_tokens)}
        budget = self._limits.max_num_batched_tokens - chunks[oldest.attempt_id]
        does_one_end = chunks[oldest.attempt_id] == oldest.num_remaining_tokens
        for prefill in sorted(self._running.values(), key=lambda candidate: candidate.num_remaining_tokens):
            num_more = prefill.num_remaining_tokens - chunks.get(prefill.attempt_id, 0)
            if budget == 0 or (num_more > budget and does_one_end):
                break
            if num_more > 0:
                chunks[prefill.attempt_id] = chunks.get(prefill.attempt_id, 0) + min(num_more, budget)
                does_one_end = does_one_end or num_more <= budget
                budget -= min(num_more, budget)
        return BatchPlan(slices=tuple(_slice(self._running[attempt_id], n) for attempt_id, n in chunks.items()))

    def commit(self, plan: BatchPlan) -> list[tuple[int, Prefill]]:
        """Takes a step for done; returns (index of the slice, attempt) for each prompt that ended with it.

        Their blocks stay theirs until `release`. Slices of attempts released since `plan` are passed over.
        """
        ended = []
        for index, piece in enumerate(plan.slices):
            prefill = self._running.get(piece.attempt_id)
            if prefill is None:
                continue
            prefill.num_computed_tokens = piece.end_position
            prefill.num_chunks += 1
            if prefill.num_remaining_tokens == 0:
                self._held[piece.attempt_id] = self._running.pop(piece.attempt_id)
                ended.append((index, prefill))
        return ended

    def release(self, attempt_id: str) -> bool:
        """Forgets an attempt in whatever state and frees its blocks; False when it is not here. Not during a step."""
        for attempts in (self._waiting, self._running, self._held):
            prefill = attempts.pop(attempt_id, None)
            if prefill is not None:
                if prefill.block_table:
                    self._pool.free(attempt_id, prefill.block_table)
                return True
        return False

    def _can_start(self) -> bool:
        if not self._waiting or len(self._running) + len(self._held) >= self._limits.max_num_seqs:
            return False
        return self._num_blocks(next(iter(self._waiting.values()))) <= self._pool.num_free

    def _num_blocks(self, prefill: Prefill) -> int:
        return -(-len(prefill.token_ids) // self._pool.block_size)


def _slice(prefill: Prefill, num_tokens: int) -> SequenceSlice:
    start, end = prefill.num_computed_tokens, prefill.num_computed_tokens + num_tokens
    return SequenceSlice(
        attempt_id=prefill.attempt_id,
        token_ids=prefill.token_ids[start:end],
        start_position=start,
        block_table=prefill.block_table,
        sampling=prefill.sampling if end == len(prefill.token_ids) else None,
        rules=prefill.rules,
        top_logprobs=prefill.logprobs.output_top,
        scored=_scored(prefill, start, end),
    )


def _scored(prefill: Prefill, start: int, end: int) -> ScoredIds | None:
    top = prefill.logprobs.prompt_top
    return None if top is None else ScoredIds(token_ids=prefill.token_ids[start + 1 : end + 1], top=top)
