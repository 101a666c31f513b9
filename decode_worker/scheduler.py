"""Which sequences take a step together, and how they come and go. Pure policy: no I/O, no torch.

A sequence is taken in, in order of arrival, when the blocks of its prompt are free and one more for each output
that may still grow; these get further blocks as they grow. After its KV cache was copied each of its branches takes
part in every step for which it has a block, so a step's batch is simply everything that runs.

The branches of a sequence, one for each output that was asked for, share the blocks that the prompt fills. Each has the
block that it writes to, and all after it, to itself, and gives them back when it ends; the shared ones are the
sequence's, and go back with its last branch. In everything else a sequence is one, so it is swapped with each block
once, and comes back sharing what it shared.

A sequence whose reader is behind is parked: it leaves the batch and keeps its slot and its blocks, so that it can come
back at any step.

Who gives way when blocks run short is in `decode_worker.room`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import ServingError
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.token_rules import take_token
from decode_worker.room import RoomMaker
from decode_worker.seats import Seats
from decode_worker.sequence import NewToken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.block_pool import BlockPool
    from baton.worker.engine_loop import Preemptions
    from decode_worker.sequence import DecodeSequence, Swap


class DecodeScheduler:
    """Owns every attempt's blocks, from admission to removal, and its slots of the swap space.

    `swap` counts the blocks of the swap space; None: there is none.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, swap: BlockPool | None = None) -> None:
        self._seats = Seats(pool=pool, swap=swap, max_num_seqs=max_num_seqs)
        self._room = RoomMaker(self._seats)

    @property
    def num_waiting(self) -> int:
        """Attempts that do not take part in steps and should: without room, or being copied."""
        num_wanting = sum(not sequence.is_parked for sequence in self._seats.away.values())
        copied = len(self._seats.copying) + len(self._seats.leaving) + len(self._seats.returning)
        return len(self._seats.waiting) + copied + num_wanting

    @property
    def num_running(self) -> int:
        """Sequences in the batch, or that would be if they had a block."""
        return len(self._seats.running)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their readers."""
        return len(self._seats.parked) + sum(sequence.is_parked for sequence in self._seats.away.values())

    @property
    def is_swapping(self) -> bool:
        """Whether blocks are on their way to the swap space or back."""
        return bool(self._seats.leaving or self._seats.returning)

    @property
    def preemptions(self) -> Preemptions:
        """What was done for want of blocks."""
        return self._room.preemptions

    @property
    def has_work(self) -> bool:
        """Whether `plan`, with what comes before it, may have something to do now or after a change."""
        return bool(self._seats.running or self._seats.waiting or self._seats.away)

    def add(self, sequence: DecodeSequence) -> None:
        """Puts an attempt behind all others."""
        self._room.add(sequence)

    def make_room(self) -> tuple[list[Swap], list[DecodeSequence]]:
        """Gives running sequences the blocks that their next tokens need. To be called before `take_in` and `plan`.

        Returns the swaps to be started now, each to be ended with `end_swap`, and the sequences that were shed: they
        are gone, and their blocks are free.
        """
        return self._room.make_room()

    def take_in(self) -> list[DecodeSequence]:
        """Gives blocks to waiting attempts, strictly in order; returns those whose KV cache is to be copied now."""
        return self._room.take_in()

    def is_condemned(self, attempt_id: str) -> bool:
        """Whether an attempt that is being copied was removed meanwhile."""
        return attempt_id in self._seats.condemned

    def end_copy(self, attempt_id: str, *, join: bool) -> bool:
        """Takes note that nothing writes to the attempt's blocks any more.

        True: the sequence is in the next step's batch. False (it is not to join, or it was removed meanwhile):
        it is gone and its blocks are free.
        """
        sequence = self._seats.copying.pop(attempt_id)
        if join and attempt_id not in self._seats.condemned:
            self._seats.running[attempt_id] = sequence
            return True
        self._seats.condemned.discard(attempt_id)
        self._seats.free_blocks(sequence)
        return False

    def end_swap(self, attempt_id: str, *, succeeded: bool) -> bool:
        """Takes note that a swap is over: nothing reads or writes the attempt's blocks and slots any more.

        False (it failed, or the attempt was removed meanwhile): it is gone, and blocks and slots are free.
        """
        is_out = attempt_id in self._seats.leaving
        sequence = self._seats.leaving.pop(attempt_id) if is_out else self._seats.returning.pop(attempt_id)
        if not succeeded or attempt_id in self._seats.condemned:
            self._seats.condemned.discard(attempt_id)
            self._seats.free_blocks(sequence)
            self._seats.free_slots(sequence)
            return False
        if is_out:
            self._seats.pool.free(attempt_id, sequence.blocks)
            sequence.move(sequence.slots)
            self._seats.away[attempt_id] = sequence
        else:
            self._seats.free_slots(sequence)
            (self._seats.parked if sequence.is_parked else self._seats.running)[attempt_id] = sequence
            for choice in sequence.ending:
                self._seats.end_branch(sequence, choice)
            sequence.ending.clear()
        return True

    def end_choice(self, attempt_id: str, choice: int) -> DecodeSequence | None:
        """Takes a sequence's branch out and frees what it has to itself; harmless when it has ended. Not during a step.

        Returns the sequence when that was its last one: it is gone, and all its blocks are free. One that is swapped
        out, or on its way, keeps the branch's blocks until it is back.
        """
        for attempts in (self._seats.running, self._seats.parked):
            if sequence := attempts.get(attempt_id):
                self._seats.end_branch(sequence, choice)
                if sequence.branches:
                    return None
                del attempts[attempt_id]
                return sequence
        for attempts in (self._seats.leaving, self._seats.away, self._seats.returning):
            if sequence := attempts.get(attempt_id):
                sequence.ending.add(choice)
                if all(branch.choice in sequence.ending for branch in sequence.branches):
                    return self.remove(attempt_id)
        return None

    def park(self, attempt_id: str) -> None:
        """Takes a sequence out of the batch. Harmless when it has ended; allowed during a step."""
        for attempts in (self._seats.running, self._seats.leaving, self._seats.away, self._seats.returning):
            if sequence := attempts.get(attempt_id):
                sequence.is_parked = True
        if sequence := self._seats.running.pop(attempt_id, None):
            self._seats.parked[attempt_id] = sequence

    def resume(self, attempt_id: str) -> None:
        """Puts a parked sequence back into the batch as soon as it can be. Harmless when it is not parked."""
        for attempts in (self._seats.parked, self._seats.leaving, self._seats.away, self._seats.returning):
            if sequence := attempts.get(attempt_id):
                sequence.is_parked = False
        if sequence := self._seats.parked.pop(attempt_id, None):
            self._seats.running[attempt_id] = sequence

    def plan(self) -> BatchPlan:
        """The next step; without slices when nothing that runs has a block to write to."""
        return BatchPlan(
            slices=tuple(
                SequenceSlice(
                    attempt_id=sequence.attempt_id,
                    choice=branch.choice,
                    token_ids=(branch.last_token_id,),
                    start_position=branch.last_position,
                    block_table=branch.block_table,
                    sampling=branch.sampling,
                    rules=branch.rules,
                    top_logprobs=sequence.top_logprobs,
                )
                for sequence in self._seats.running.values()
                for branch in sequence.branches
                if not self._room.short or (sequence.attempt_id, branch.choice) not in self._room.short
            )
        )

    def commit(self, plan: BatchPlan, tokens: Sequence[int | None]) -> list[NewToken]:
        """Takes a step for done. A branch that finished stays until `end_choice`; those that left are passed over."""
        produced = []
        for piece, token_id in zip(plan.slices, tokens, strict=True):
            # One that was parked during the step has its token all the same.
            sequence = self._seats.running.get(piece.attempt_id) or self._seats.parked.get(piece.attempt_id)
            branch = None if sequence is None else sequence.find(piece.choice)
            if sequence is None or branch is None:
                continue
            assert token_id is not None, f"{piece.attempt_id}: a decode step without a token"
            branch.last_token_id = token_id
            branch.last_position += 1
            branch.num_steps += 1
            reason, error = None, None
            try:
                reason = take_token(branch.rules, sequence.stop, token_id, sequence.num_generated(branch))
            except ServingError as failure:
                error = failure
            produced.append(
                NewToken(
                    attempt_id=piece.attempt_id,
                    choice=piece.choice,
                    position=branch.last_position,
                    token_id=token_id,
                    finish_reason=reason,
                    error=error,
                )
            )
        return produced

    def remove(self, attempt_id: str) -> DecodeSequence | None:
        """Forgets an attempt and frees what it holds; None when it is not here (any more, or yet). Not during a step.

        The blocks of an attempt that is being copied are still written to or read: it is condemned, and `end_copy` or
        `end_swap` frees them.
        """
        return self._seats.remove(attempt_id)
