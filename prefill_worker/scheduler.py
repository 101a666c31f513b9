"""Which prompt chunks run in a step. Pure policy: no I/O, no torch, time passed in.

A prompt gets all its blocks before its first chunk, in order of arrival, so whatever started can finish. A step's
budget goes to the prompts with the least left to compute. When a prompt ends in a step, the rest is not filled up
with prompts that don't: a chat's first token is not held up by a long prompt's bulk.

So that no prompt starves, the oldest one has a share of all tokens: for each token computed of it, the others may
have (1 - share) / share tokens before it has a step of its own. A prompt of n tokens ends at the latest when, since
it became the oldest, n tokens of its own and n * (1 - share) / share of the others were computed, and up to two
steps besides.

A short prompt need not wait for the end of a step either: it may run in the middle of one (`plan_interrupt`).
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


# A prompt interrupts a step only when so many of it fit into the shortest prompt that it holds up: the gain is large
# and the harm small.
MIN_LENGTH_RATIO = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """What a step and the worker may hold, and the oldest prompt's share of all tokens, above 0 and up to 1."""

    max_num_batched_tokens: int
    max_num_seqs: int
    oldest_share: float


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
        # Tokens that may be computed of others before the oldest has a step of its own; below 0 is debt.
        self._allowance = 0.0

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
        shortest_first = sorted(self._running.values(), key=_num_remaining_tokens)
        chunks = self._fill(shortest_first)
        if oldest.attempt_id not in chunks and self._allowance <= 0:
            chunks = self._fill([oldest, *(each for each in shortest_first if each is not oldest)])
        return self._spend(chunks)

    def plan_interrupt(self, step: BatchPlan) -> BatchPlan:
        """What may run in the middle of `step`, which was planned and not committed; without slices when nothing may.

        Prompts much shorter than any in `step`, within what the oldest leaves to others. To be committed before it.
        """
        computing = {piece.attempt_id for piece in step.slices}
        if self._allowance <= 0 or len(computing) == len(self._running):
            return BatchPlan(slices=())
        shortest = min(len(self._running[attempt_id].token_ids) for attempt_id in computing)
        candidates = [
            prefill
            for prefill in self._running.values()
            if prefill.attempt_id not in computing and prefill.num_remaining_tokens * MIN_LENGTH_RATIO <= shortest
        ]
        return self._spend(self._fill(sorted(candidates, key=_num_remaining_tokens)))

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

    def _fill(self, prefills: Sequence[Prefill]) -> dict[str, int]:
        """Tokens of a step by attempt: the budget goes to `prefills` in their order."""
        chunks: dict[str, int] = {}
        budget = self._limits.max_num_batched_tokens
        does_one_end = False
        for prefill in prefills:
            does_end = prefill.num_remaining_tokens <= budget
            if budget == 0 or (does_one_end and not does_end):
                break
            chunks[prefill.attempt_id] = min(prefill.num_remaining_tokens, budget)
            budget -= chunks[prefill.attempt_id]
            does_one_end = does_one_end or does_end
        return chunks

    def _spend(self, chunks: dict[str, int]) -> BatchPlan:
        """The plan of `chunks`, with the account between the oldest and the others kept."""
        oldest = next(iter(self._running))
        of_oldest = chunks.get(oldest, 0)
        others_per_token = 1 / self._limits.oldest_share - 1
        most = others_per_token * self._limits.max_num_batched_tokens
        self._allowance = min(most, self._allowance + others_per_token * of_oldest)
        self._allowance -= sum(chunks.values()) - of_oldest
        return BatchPlan(slices=tuple(_slice(self._running[attempt_id], n) for attempt_id, n in chunks.items()))

    def _can_start(self) -> bool:
        if not self._waiting or len(self._running) + len(self._held) >= self._limits.max_num_seqs:
            return False
        return self._num_blocks(next(iter(self._waiting.values()))) <= self._pool.num_free

    def _num_blocks(self, prefill: Prefill) -> int:
        return -(-len(prefill.token_ids) // self._pool.block_size)


def _num_remaining_tokens(prefill: Prefill) -> int:
    return prefill.num_remaining_tokens


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
