"""Which sequences take a step together. Pure policy: no I/O, no torch, time passed in.

A sequence gets the blocks of its prompt and of all tokens it may generate when it is taken in, in order of
arrival: whatever runs can run to its end, and nothing is ever preempted. After its KV cache was copied it takes
part in every step, so a step's batch is simply everything that runs.

A sequence whose reader is behind is parked: it leaves the batch and keeps its slot and its blocks, so that it can come
back at any step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.errors import ServingError
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.token_rules import take_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import FinishReason, SamplingParams, StopRule
    from baton.engine.block_pool import BlockPool
    from baton.engine.token_rules import TokenRules


@dataclass(slots=True, kw_only=True)
class DecodeSequence:
    """One attempt inside the worker. Its blocks belong to the scheduler until the attempt is removed."""

    attempt_id: str
    num_prompt_tokens: int
    last_token_id: int
    sampling: SamplingParams
    stop: StopRule
    rules: TokenRules | None = None
    top_logprobs: int | None = None
    num_generated: int = 1
    num_steps: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def last_position(self) -> int:
        """Where the last token stands. Its keys and values are not in the cache yet."""
        return self.num_prompt_tokens + self.num_generated - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token that a step produced; `finish_reason` is set when it is its sequence's last.

    With an `error` the sequence cannot go on after it.
    """

    attempt_id: str
    position: int
    token_id: int
    finish_reason: FinishReason | None
    error: ServingError | None


class DecodeScheduler:
    """Owns every attempt's blocks, from admission to removal."""

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        # In order of arrival. An attempt is in exactly one of the four.
        self._waiting: dict[str, DecodeSequence] = {}
        self._copying: dict[str, DecodeSequence] = {}
        self._running: dict[str, DecodeSequence] = {}
        self._parked: dict[str, DecodeSequence] = {}
        self._condemned: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Attempts that do not take part in steps: without room, or being copied."""
        return len(self._waiting) + len(self._copying)

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their readers."""
        return len(self._parked)

    @property
    def has_step(self) -> bool:
        """Whether something runs, or can be taken in."""
        return bool(self._running) or self._can_take_in()

    def add(self, sequence: DecodeSequence) -> None:
        """Puts an attempt behind all others."""
        self._waiting[sequence.attempt_id] = sequence

    def take_in(self) -> list[DecodeSequence]:
        """Gives blocks to waiting attempts, strictly in order; returns those whose KV cache is to be copied now."""
        taken = []
        while self._can_take_in():
            sequence = next(iter(self._waiting.values()))
            sequence.block_table = self._pool.allocate(sequence.attempt_id, self._num_blocks(sequence))
            del self._waiting[sequence.attempt_id]
            self._copying[sequence.attempt_id] = sequence
            taken.append(sequence)
        return taken

    def end_copy(self, attempt_id: str, *, join: bool) -> bool:
        """Takes note that nothing writes to the attempt's blocks any more.

        True: the sequence is in the next step's batch. False (it is not to join, or it was removed meanwhile):
        it is gone and its blocks are free.
        """
        sequence = self._copying.pop(attempt_id)
        if join and attempt_id not in self._condemned:
            self._running[attempt_id] = sequence
            return True
        self._condemned.discard(attempt_id)
        self._pool.free(attempt_id, sequence.block_table)
        return False

    def park(self, attempt_id: str) -> None:
        """Takes a sequence out of the batch. Harmless when it does not run; allowed during a step."""
        if sequence := self._running.pop(attempt_id, None):
            self._parked[attempt_id] = sequence

    def resume(self, attempt_id: str) -> None:
        """Puts a parked sequence back into the next step's batch. Harmless when it is not parked."""
        if sequence := self._parked.pop(attempt_id, None):
            self._running[attempt_id] = sequence

    def plan(self) -> BatchPlan:
        """The next step; without slices when nothing runs."""
        return BatchPlan(
            slices=tuple(
                SequenceSlice(
                    attempt_id=sequence.attempt_id,
                    token_ids=(sequence.last_token_id,),
                    start_position=sequence.last_position,
                    block_table=sequence.block_table,
                    sampling=sequence.sampling,
                    rules=sequence.rules,
                    top_logprobs=sequence.top_logprobs,
                )
                for sequence in self._running.values()
            )
        )

    def commit(self, plan: BatchPlan, tokens: Sequence[int | None]) -> list[NewToken]:
        """Takes a step for done. A sequence that finished stays until `remove`; removed ones are passed over."""
        produced = []
        for piece, token_id in zip(plan.slices, tokens, strict=True):
            # One that was parked during the step has its token all the same.
            sequence = self._running.get(piece.attempt_id) or self._parked.get(piece.attempt_id)
            if sequence is None:
                continue
            assert token_id is not None, f"{piece.attempt_id}: a decode step without a token"
            sequence.last_token_id = token_id
            sequence.num_generated += 1
            sequence.num_steps += 1
            reason, error = None, None
            try:
                reason = take_token(sequence.rules, sequence.stop, token_id, sequence.num_generated)
            except ServingError as failure:
                error = failure
            produced.append(
                NewToken(
                    attempt_id=piece.attempt_id,
                    position=sequence.last_position,
                    token_id=token_id,
                    finish_reason=reason,
                    error=error,
                )
            )
        return produced

    def remove(self, attempt_id: str) -> DecodeSequence | None:
        """Forgets an attempt and frees its blocks; None when it is not here (any more, or yet). Not during a step.

        The blocks of an attempt that is being copied are still written to: it is condemned, and `end_copy` frees
        them.
        """
        if attempt_id in self._copying:
            self._condemned.add(attempt_id)
            return None
        sequence = None
        for attempts in (self._waiting, self._running, self._parked):
            sequence = sequence or attempts.pop(attempt_id, None)
        if sequence is not None and sequence.block_table:
            self._pool.free(attempt_id, sequence.block_table)
        return sequence

    def _can_take_in(self) -> bool:
        num_slots = len(self._copying) + len(self._running) + len(self._parked)
        if not self._waiting or num_slots >= self._max_num_seqs:
            return False
        return self._num_blocks(next(iter(self._waiting.values()))) <= self._pool.num_free

    def _num_blocks(self, sequence: DecodeSequence) -> int:
        return -(-(sequence.num_prompt_tokens + sequence.stop.max_tokens) // self._pool.block_size)
