"""Which sequences take a step together, and who gives way when blocks run short. Pure policy: no I/O, no torch.

A sequence is taken in, in order of arrival, when the blocks of its prompt are free and one more for each output
that may still grow; these get further blocks as they grow. After its KV cache was copied each of its branches takes
part in every step for which it has a block, so a step's batch is simply everything that runs.

The branches of a sequence, one for each output that was asked for, share the blocks that the prompt fills. Each has the
block that it writes to, and all after it, to itself, and gives them back when it ends; the shared ones are the
sequence's, and go back with its last branch. In everything else a sequence is one, so it is swapped with each block
once, and comes back sharing what it shared.

A sequence whose reader is behind is parked: it leaves the batch and keeps its slot and its blocks, so that it can come
back at any step.

When a sequence needs a block and none is free, another one is preempted: a parked one, the latest first; if there is
none, the latest of those that arrived after it. One that nobody can make room for waits, so the oldest that runs
always goes on. A preempted sequence is swapped: its blocks are copied to host memory, then freed. It comes back, the
oldest first, when there is room for it and a block for each that runs and may grow, before anybody is taken in. Where
the swap space has no room for it, it is shed: nothing here could compute its cache again.

Early and late are told by places in the order of arrival. Of a tenant's places its sequences of the highest priority
have the earliest, so among its own the lowest priority gives way first; other tenants do not notice. Nobody is taken
in earlier for a priority: the gateways' queue has seen to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import ServingError
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.token_rules import take_token
from baton.worker.engine_loop import Preemptions
from decode_worker.sequence import Branch, DecodeSequence, NewToken, Swap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.engine.block_pool import BlockPool


class DecodeScheduler:
    """Owns every attempt's blocks, from admission to removal, and its slots of the swap space.

    `swap` counts the blocks of the swap space; None: there is none.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, swap: BlockPool | None = None) -> None:
        self._pool = pool
        self._swap = swap
        self._max_num_seqs = max_num_seqs
        # An attempt is in exactly one of these.
        self._waiting: dict[str, DecodeSequence] = {}
        self._copying: dict[str, DecodeSequence] = {}
        self._running: dict[str, DecodeSequence] = {}
        self._parked: dict[str, DecodeSequence] = {}
        self._leaving: dict[str, DecodeSequence] = {}
        self._away: dict[str, DecodeSequence] = {}
        self._returning: dict[str, DecodeSequence] = {}
        self._condemned: set[str] = set()
        # Of the branches that run, which got no block for the next step: by attempt and choice.
        self._short: frozenset[tuple[str, int]] = frozenset()
        self._num_added = 0
        self._num_swapped = self._num_shed = self._blocks_out = self._blocks_in = 0

    @property
    def num_waiting(self) -> int:
        """Attempts that do not take part in steps and should: without room, or being copied."""
        num_wanting = sum(not sequence.is_parked for sequence in self._away.values())
        copied = len(self._copying) + len(self._leaving) + len(self._returning)
        return len(self._waiting) + copied + num_wanting

    @property
    def num_running(self) -> int:
        """Sequences in the batch, or that would be if they had a block."""
        return len(self._running)

    @property
    def num_parked(self) -> int:
        """Sequences that wait for their readers."""
        return len(self._parked) + sum(sequence.is_parked for sequence in self._away.values())

    @property
    def preemptions(self) -> Preemptions:
        """What was done for want of blocks."""
        return Preemptions(
            num_swapped=self._num_swapped,
            num_shed=self._num_shed,
            blocks_out=self._blocks_out,
            blocks_in=self._blocks_in,
            num_away=len(self._away),
        )

    @property
    def has_work(self) -> bool:
        """Whether `plan`, with what comes before it, may have something to do now or after a change."""
        return bool(self._running or self._waiting or self._away)

    def add(self, sequence: DecodeSequence) -> None:
        """Puts an attempt behind all others."""
        sequence.order = self._num_added
        self._num_added += 1
        self._waiting[sequence.attempt_id] = sequence
        self._pass_places(sequence.tenant)

    def make_room(self) -> tuple[list[Swap], list[DecodeSequence]]:
        """Gives running sequences the blocks that their next tokens need. To be called before `take_in` and `plan`.

        Returns the swaps to be started now, each to be ended with `end_swap`, and the sequences that were shed: they
        are gone, and their blocks are free.
        """
        swaps: list[Swap] = []
        shed: list[DecodeSequence] = []
        short = self._grow()
        while short and (victim := self._victim_for(short)) is not None:
            if not self._preempt(victim, swaps, shed):
                break
            short = self._grow()
        self._short = frozenset((each.attempt_id, branch.choice) for each, branch in short)
        if not short:
            self._call_back(swaps, shed)
        return swaps, shed

    def take_in(self) -> list[DecodeSequence]:
        """Gives blocks to waiting attempts, strictly in order; returns those whose KV cache is to be copied now."""
        taken = []
        while (sequence := self._next_waiting()) is not None and self._num_missing(sequence) <= 0:
            block_size = self._pool.block_size
            num_blocks = sequence.blocks_for_step(block_size)
            sequence.settle(self._pool.allocate(sequence.attempt_id, num_blocks), block_size)
            del self._waiting[sequence.attempt_id]
            self._copying[sequence.attempt_id] = sequence
            taken.append(sequence)
        return taken

    def is_condemned(self, attempt_id: str) -> bool:
        """Whether an attempt that is being copied was removed meanwhile."""
        return attempt_id in self._condemned

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
        self._free_blocks(sequence)
        return False

    def end_swap(self, attempt_id: str, *, succeeded: bool) -> bool:
        """Takes note that a swap is over: nothing reads or writes the attempt's blocks and slots any more.

        False (it failed, or the attempt was removed meanwhile): it is gone, and blocks and slots are free.
        """
        is_out = attempt_id in self._leaving
        sequence = self._leaving.pop(attempt_id) if is_out else self._returning.pop(attempt_id)
        if not succeeded or attempt_id in self._condemned:
            self._condemned.discard(attempt_id)
            self._free_blocks(sequence)
            self._free_slots(sequence)
            return False
        if is_out:
            self._pool.free(attempt_id, sequence.blocks)
            sequence.move(sequence.slots)
            self._away[attempt_id] = sequence
        else:
            self._free_slots(sequence)
            (self._parked if sequence.is_parked else self._running)[attempt_id] = sequence
            for choice in sequence.ending:
                self._end_branch(sequence, choice)
            sequence.ending.clear()
        return True

    def end_choice(self, attempt_id: str, choice: int) -> DecodeSequence | None:
        """Takes a sequence's branch out and frees what it has to itself; harmless when it has ended. Not during a step.

        Returns the sequence when that was its last one: it is gone, and all its blocks are free. One that is swapped
        out, or on its way, keeps the branch's blocks until it is back.
        """
        for attempts in (self._running, self._parked):
            if sequence := attempts.get(attempt_id):
                self._end_branch(sequence, choice)
                if sequence.branches:
                    return None
                del attempts[attempt_id]
                return sequence
        for attempts in (self._leaving, self._away, self._returning):
            if sequence := attempts.get(attempt_id):
                sequence.ending.add(choice)
                if all(branch.choice in sequence.ending for branch in sequence.branches):
                    return self.remove(attempt_id)
        return None

    def park(self, attempt_id: str) -> None:
        """Takes a sequence out of the batch. Harmless when it has ended; allowed during a step."""
        for attempts in (self._running, self._leaving, self._away, self._returning):
            if sequence := attempts.get(attempt_id):
                sequence.is_parked = True
        if sequence := self._running.pop(attempt_id, None):
            self._parked[attempt_id] = sequence

    def resume(self, attempt_id: str) -> None:
        """Puts a parked sequence back into the batch as soon as it can be. Harmless when it is not parked."""
        for attempts in (self._parked, self._leaving, self._away, self._returning):
            if sequence := attempts.get(attempt_id):
                sequence.is_parked = False
        if sequence := self._parked.pop(attempt_id, None):
            self._running[attempt_id] = sequence

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
                for sequence in self._running.values()
                for branch in sequence.branches
                if not self._short or (sequence.attempt_id, branch.choice) not in self._short
            )
        )

    def commit(self, plan: BatchPlan, tokens: Sequence[int | None]) -> list[NewToken]:
        """Takes a step for done. A branch that finished stays until `end_choice`; those that left are passed over."""
        produced = []
        for piece, token_id in zip(plan.slices, tokens, strict=True):
            # One that was parked during the step has its token all the same.
            sequence = self._running.get(piece.attempt_id) or self._parked.get(piece.attempt_id)
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
        if attempt_id in self._copying or attempt_id in self._leaving or attempt_id in self._returning:
            self._condemned.add(attempt_id)
            return None
        for attempts in (self._waiting, self._running, self._parked):
            if sequence := attempts.pop(attempt_id, None):
                self._free_blocks(sequence)
                return sequence
        if sequence := self._away.pop(attempt_id, None):
            self._free_slots(sequence)
            return sequence
        return None

    def _pass_places(self, tenant: str) -> None:
        """Gives the tenant's places in the order of arrival to its sequences by their priorities."""
        everywhere = (self._waiting, self._copying, self._running, self._parked)
        swapped = (self._leaving, self._away, self._returning)
        own = [each for attempts in everywhere + swapped for each in attempts.values() if each.tenant == tenant]
        places = sorted(map(_order, own))
        for sequence, place in zip(sorted(own, key=_precedence), places, strict=True):
            sequence.order = place

    # --- who has room -----------------------------------------------------------------------------------------

    def _grow(self) -> list[tuple[DecodeSequence, Branch]]:
        """Gives a block to each that needs one for its next step; those that got none, the oldest first."""
        block_size = self._pool.block_size
        needy = [
            (sequence, branch)
            for sequence in self._running.values()
            for branch in sequence.branches
            if branch.last_position >= len(branch.block_table) * block_size
        ]
        if len(needy) > self._pool.num_free:
            needy.sort(key=_order_of_first)
        num_grown = min(len(needy), self._pool.num_free)
        for sequence, branch in needy[:num_grown]:
            branch.block_table += self._pool.allocate(sequence.attempt_id, 1)
        return needy[num_grown:]

    def _num_missing(self, comer: DecodeSequence) -> int:
        """Blocks that have to become free before it can come: its own, and one for each branch here that may grow."""
        block_size = self._pool.block_size
        here = (self._copying, self._running, self._returning)
        num_growing = sum(each.num_growing(block_size) for attempts in here for each in attempts.values())
        return comer.blocks_for_step(block_size) + num_growing - self._pool.num_free

    def _next_waiting(self) -> DecodeSequence | None:
        """Who is to be taken in next, if blocks allow: nobody as long as one that was swapped out wants to go on."""
        comer = next(iter(self._waiting.values()), None)
        if comer is None or self._first_away() is not None:
            return None
        here = (self._copying, self._running, self._parked, self._leaving, self._away, self._returning)
        num_seqs = sum(len(each.branches) for attempts in here for each in attempts.values())
        return comer if num_seqs + len(comer.branches) <= self._max_num_seqs else None

    def _first_away(self) -> DecodeSequence | None:
        """The oldest sequence that is swapped out and wants to go on."""
        return min((each for each in self._away.values() if not each.is_parked), key=_order, default=None)

    # --- who gives way ----------------------------------------------------------------------------------------

    def _victim_for(self, short: list[tuple[DecodeSequence, Branch]]) -> DecodeSequence | None:
        """Who is to give way to those that need a block; None when enough will be free soon, or nobody has to."""
        if len(short) <= self._num_soon_free():
            return None
        younger = [each for each in self._running.values() if each.order > short[0][0].order]
        return self._choose(self._parked.values()) or self._choose(younger)

    def _choose(self, candidates: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """The latest that the swap space has room for; the latest where it has room for none."""
        latest_first = sorted(candidates, key=_order, reverse=True)
        return next((each for each in latest_first if self._has_slots(each)), next(iter(latest_first), None))

    def _has_slots(self, sequence: DecodeSequence) -> bool:
        return self._swap is not None and sequence.num_blocks <= self._swap.num_free

    def _preempt(self, victim: DecodeSequence, swaps: list[Swap], shed: list[DecodeSequence]) -> bool:
        """Swaps a sequence out or sheds it; False when it is to wait for a swap that runs."""
        if not self._has_slots(victim):
            if self._leaving or self._returning:
                return False
            self.remove(victim.attempt_id)
            self._num_shed += 1
            shed.append(victim)
            return True
        assert self._swap is not None
        (self._parked if victim.is_parked else self._running).pop(victim.attempt_id)
        self._leaving[victim.attempt_id] = victim
        victim.slots = self._swap.allocate(victim.attempt_id, victim.num_blocks)
        self._num_swapped += 1
        self._blocks_out += len(victim.slots)
        swaps.append(_swap(victim, is_out=True))
        return True

    def _call_back(self, swaps: list[Swap], shed: list[DecodeSequence]) -> None:
        """Lets sequences return, the oldest first, and moves parked ones out of the way of who can come next."""
        while (comer := self._first_away()) is not None:
            is_alone = not (self._running or self._copying or self._leaving or self._returning)
            self._clear_way(comer, swaps, shed, may_shed=is_alone)
            if self._num_missing(comer) > 0:
                return
            comer.move(self._pool.allocate(comer.attempt_id, len(comer.slots)))
            self._returning[comer.attempt_id] = self._away.pop(comer.attempt_id)
            self._blocks_in += len(comer.slots)
            swaps.append(_swap(comer, is_out=False))
        if (waiting := self._next_waiting()) is not None:
            self._clear_way(waiting, swaps, shed, may_shed=False)

    def _clear_way(
        self, comer: DecodeSequence, swaps: list[Swap], shed: list[DecodeSequence], *, may_shed: bool
    ) -> None:
        """Preempts parked sequences until `comer` has room or soon will have."""
        while self._num_missing(comer) > self._num_soon_free() and (victim := self._choose(self._parked.values())):
            if not (may_shed or self._has_slots(victim)) or not self._preempt(victim, swaps, shed):
                return

    def _num_soon_free(self) -> int:
        return sum(each.num_blocks for each in self._leaving.values())

    def _end_branch(self, sequence: DecodeSequence, choice: int) -> None:
        branch = sequence.find(choice)
        if branch is None:
            return
        sequence.num_steps = max(sequence.num_steps, branch.num_steps)
        if len(sequence.branches) == 1:
            self._free_blocks(sequence)
        else:
            self._pool.free(sequence.attempt_id, branch.block_table[sequence.num_shared :])
        sequence.branches.remove(branch)

    def _free_blocks(self, sequence: DecodeSequence) -> None:
        self._pool.free(sequence.attempt_id, sequence.blocks)
        for branch in sequence.branches:
            branch.block_table = []

    def _free_slots(self, sequence: DecodeSequence) -> None:
        if self._swap is not None:
            self._swap.free(sequence.attempt_id, sequence.slots)
            sequence.slots = []


def _order(sequence: DecodeSequence) -> int:
    return sequence.order


def _order_of_first(needy: tuple[DecodeSequence, Branch]) -> int:
    return needy[0].order


def _precedence(sequence: DecodeSequence) -> tuple[int, int]:
    return -sequence.priority, sequence.order


def _swap(sequence: DecodeSequence, *, is_out: bool) -> Swap:
    return Swap(
        attempt_id=sequence.attempt_id,
        is_out=is_out,
        block_ids=tuple(sequence.blocks),
        slots=tuple(sequence.slots),
    )
