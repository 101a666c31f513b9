"""Which prompt chunks run in a step. Pure policy: no I/O, no torch, time passed in.

A prompt gets all its blocks before its first chunk, in order of arrival, so whatever started can finish. A step's
budget goes to the prompts with the least left to compute. When a prompt ends in a step, the rest is not filled up
with prompts that don't: a chat's first token is not held up by a long prompt's bulk.

So that no prompt starves, the oldest one has a share of all tokens: for each token computed of it, the others may
have (1 - share) / share tokens before it has a step of its own. A prompt of n tokens ends at the latest when, since
it became the oldest, n tokens of its own and n * (1 - share) / share of the others were computed, and up to two
steps besides.

A short prompt need not wait for the end of a step either: it may run in the middle of one (`plan_interrupt`).

Blocks that a committed step has filled are published under the digest of all tokens up to their end. A prompt begins
after the blocks that are known already, and passes over those that others publish while it runs; only what is left
counts as its length. Its last token is computed always, for the first token of the output follows from it. So the block
that a step writes into is never one that is shared: whole blocks are taken over, and computing starts after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from baton.core.generation import NO_LOGPROBS
from baton.engine.batch import BatchPlan, ScoredIds, SequenceSlice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import LogprobOptions, SamplingParams
    from baton.core.prefixes import PrefixDigests
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
    """One attempt inside the worker. Its blocks belong to the scheduler until `release`.

    Entries of `block_table` before the one of position `num_computed_tokens` do not change any more. Prompts with
    different values of `cache_salt` share no blocks. `num_cached_tokens` were found computed.
    """

    attempt_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    arrived_s: float
    rules: TokenRules | None = None
    logprobs: LogprobOptions = NO_LOGPROBS
    cache_salt: str = ""
    num_choices: int = 1
    started_s: float = 0.0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_chunks: int = 0
    block_table: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens that are computed for it: what it costs."""
        return len(self.token_ids) - self.num_cached_tokens

    @property
    def looks_up(self) -> bool:
        """Whether it may pass over tokens: not where the log-probabilities of each are asked for."""
        return self.logprobs.prompt_top is None


class PrefillScheduler:
    """Owns every attempt's blocks, from the first chunk to `release`. Without `digests` no prompt finds another's."""

    def __init__(self, pool: BlockPool, limits: PrefillLimits, digests: PrefixDigests | None = None) -> None:
        assert digests is None or digests.stride == pool.block_size, "a name for each block"
        self._pool = pool
        self._limits = limits
        self._digests = digests
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
    def num_used_blocks(self) -> int:
        """Blocks that attempts have; what is only kept for later prompts is not counted."""
        return self._pool.num_used

    @property
    def has_step(self) -> bool:
        """Whether the next `plan` after `start_waiting` has something to run."""
        return bool(self._running) or self._can_start()

    def add(self, prefill: Prefill) -> None:
        """Puts an attempt behind all others."""
        if self._digests is not None:
            prefill.block_names = self._digests.chain(prefill.token_ids, prefill.cache_salt)
        self._waiting[prefill.attempt_id] = prefill

    def start_waiting(self, now_s: float) -> list[Prefill]:
        """Gives blocks to waiting attempts, strictly in order, and returns those that may run now."""
        started = []
        while self._can_start():
            prefill = next(iter(self._waiting.values()))
            cached = self._find(prefill, 0)
            self._pool.share(prefill.attempt_id, cached)
            num_others = self._num_blocks(prefill) - len(cached)
            prefill.block_table = cached + self._pool.allocate(prefill.attempt_id, num_others)
            prefill.num_computed_tokens = prefill.num_cached_tokens = len(cached) * self._pool.block_size
            prefill.started_s = now_s
            del self._waiting[prefill.attempt_id]
            self._running[prefill.attempt_id] = prefill
            started.append(prefill)
        return started

    def plan(self) -> BatchPlan:
        """The next step; without slices when nothing can run."""
        if not self._running:
            return BatchPlan(slices=())
        for prefill in self._running.values():
            self._pass_over_known(prefill)
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
        shortest = min(self._running[attempt_id].num_uncached_tokens for attempt_id in computing)
        others = [prefill for prefill in self._running.values() if prefill.attempt_id not in computing]
        for prefill in others:
            self._pass_over_known(prefill)
        candidates = [each for each in others if each.num_remaining_tokens * MIN_LENGTH_RATIO <= shortest]
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
            self._publish(prefill, piece.start_position)
            if prefill.num_remaining_tokens == 0:
                self._held[piece.attempt_id] = self._running.pop(piece.attempt_id)
                ended.append((index, prefill))
        return ended

    def computed_blocks(self, attempt_id: str) -> list[int]:
        """Blocks of a prompt that runs whose every position is computed; empty for others. They stay what they are."""
        prefill = self._running.get(attempt_id)
        return [] if prefill is None else prefill.block_table[: prefill.num_computed_tokens // self._pool.block_size]

    def release(self, attempt_id: str) -> bool:
        """Forgets an attempt in whatever state and frees its blocks; False when it is not here. Not during a step."""
        for attempts in (self._waiting, self._running, self._held):
            prefill = attempts.pop(attempt_id, None)
            if prefill is not None:
                if prefill.block_table:
                    self._pool.free(attempt_id, prefill.block_table)
                return True
        return False

    def check_integrity(self) -> None:
        """AssertionError unless nothing is here and every block is free."""
        self._pool.check_integrity()
        assert self._pool.num_used == 0, f"{self._pool.num_used} blocks are used by nobody"
        assert self.num_waiting == self.num_running == self.num_held == 0, "attempts are left"

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
        return BatchPlan(slices=tuple(self._slice(self._running[attempt_id], n) for attempt_id, n in chunks.items()))

    def _can_start(self) -> bool:
        if not self._waiting or len(self._running) + len(self._held) >= self._limits.max_num_seqs:
            return False
        prefill = next(iter(self._waiting.values()))
        num_blocks = self._num_blocks(prefill)
        if num_blocks <= self._pool.num_free:
            return True
        cached = self._find(prefill, 0)
        return num_blocks - len(cached) <= self._pool.num_free_beside(cached)

    def _num_blocks(self, prefill: Prefill) -> int:
        return -(-len(prefill.token_ids) // self._pool.block_size)

    def _find(self, prefill: Prefill, first: int) -> list[int]:
        """Blocks, from the one with index `first` on, that the prompt may take from others: never its last token's."""
        end = (len(prefill.token_ids) - 1) // self._pool.block_size if prefill.looks_up else 0
        return self._pool.find(islice(prefill.block_names, first, max(first, end)))

    def _pass_over_known(self, prefill: Prefill) -> None:
        """Takes over what others have published since: the next blocks of a prompt that is behind theirs."""
        block_size = self._pool.block_size
        first = prefill.num_computed_tokens // block_size
        known = self._find(prefill, first)
        if known:
            end = first + len(known)
            self._pool.share(prefill.attempt_id, known)
            self._pool.free(prefill.attempt_id, prefill.block_table[first:end])
            prefill.block_table[first:end] = known
            prefill.num_cached_tokens += end * block_size - prefill.num_computed_tokens
            prefill.num_computed_tokens = end * block_size

    def _publish(self, prefill: Prefill, start: int) -> None:
        """Lets others find the blocks that were completed by computing from position `start` on."""
        block_size = self._pool.block_size
        end = min(prefill.num_computed_tokens // block_size, len(prefill.block_names))
        for index in range(start // block_size, end):
            prefill.block_table[index] = self._pool.publish(
                prefill.attempt_id, prefill.block_table[index], prefill.block_names[index]
            )

    def _slice(self, prefill: Prefill, num_tokens: int) -> SequenceSlice:
        start, end = prefill.num_computed_tokens, prefill.num_computed_tokens + num_tokens
        first, last = start // self._pool.block_size, (end - 1) // self._pool.block_size
        self._pool.assert_private(prefill.attempt_id, prefill.block_table[first : last + 1])
        return SequenceSlice(
            attempt_id=prefill.attempt_id,
            token_ids=prefill.token_ids[start:end],
            start_position=start,
            block_table=prefill.block_table,
            sampling=prefill.sampling if end == len(prefill.token_ids) else None,
            rules=prefill.rules,
            top_logprobs=prefill.logprobs.output_top,
            scored=_scored(prefill, start, end),
            num_choices=prefill.num_choices,
        )


def _num_remaining_tokens(prefill: Prefill) -> int:
    return prefill.num_remaining_tokens


def _scored(prefill: Prefill, start: int, end: int) -> ScoredIds | None:
    top = prefill.logprobs.prompt_top
    return None if top is None else ScoredIds(token_ids=prefill.token_ids[start + 1 : end + 1], top=top)
