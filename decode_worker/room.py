"""Who gets blocks, and who gives way when they run short. Pure policy: no I/O, no torch.

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

from itertools import chain
from typing import TYPE_CHECKING

from baton.worker.engine_loop import Preemptions
from decode_worker.sequence import Swap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from decode_worker.seats import Seats
    from decode_worker.sequence import Branch, DecodeSequence


class RoomMaker:
    """Moves attempts between the seats as blocks allow.

    `short` names the branches that run and got no block for the next step, by attempt and choice.
    """

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self.short: frozenset[tuple[str, int]] = frozenset()
        self._num_added = 0
        self._num_swapped = self._num_shed = self._blocks_out = self._blocks_in = 0

    @property
    def preemptions(self) -> Preemptions:
        """What was done for want of blocks."""
        return Preemptions(
            num_swapped=self._num_swapped,
            num_shed=self._num_shed,
            blocks_out=self._blocks_out,
            blocks_in=self._blocks_in,
            num_away=len(self._seats.away),
        )

    def add(self, sequence: DecodeSequence) -> None:
        """Puts an attempt behind all others, and gives its tenant's places to its sequences by their priorities."""
        sequence.order = self._num_added
        self._num_added += 1
        self._seats.waiting[sequence.attempt_id] = sequence
        everyone = chain(self._seats.waiting.values(), self._seats.taken())
        own = [each for each in everyone if each.tenant == sequence.tenant]
        places = sorted(map(_order, own))
        for each, place in zip(sorted(own, key=_precedence), places, strict=True):
            each.order = place

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
        self.short = frozenset((each.attempt_id, branch.choice) for each, branch in short)
        if not short:
            self._call_back(swaps, shed)
        return swaps, shed

    def take_in(self) -> list[DecodeSequence]:
        """Gives blocks to waiting attempts, strictly in order; returns those whose KV cache is to be copied now."""
        taken = []
        while (sequence := self._next_waiting()) is not None and self._num_missing(sequence) <= 0:
            block_size = self._seats.pool.block_size
            num_blocks = sequence.blocks_for_step(block_size)
            sequence.settle(self._seats.pool.allocate(sequence.attempt_id, num_blocks), block_size)
            del self._seats.waiting[sequence.attempt_id]
            self._seats.copying[sequence.attempt_id] = sequence
            taken.append(sequence)
        return taken

    def _grow(self) -> list[tuple[DecodeSequence, Branch]]:
        """Gives a block to each that needs one for its next step; those that got none, the oldest first."""
        block_size = self._seats.pool.block_size
        needy = [
            (sequence, branch)
            for sequence in self._seats.running.values()
            for branch in sequence.branches
            if branch.last_position >= len(branch.block_table) * block_size
        ]
        if len(needy) > self._seats.pool.num_free:
            needy.sort(key=_order_of_first)
        num_grown = min(len(needy), self._seats.pool.num_free)
        for sequence, branch in needy[:num_grown]:
            branch.block_table += self._seats.pool.allocate(sequence.attempt_id, 1)
        return needy[num_grown:]

    def _num_missing(self, comer: DecodeSequence) -> int:
        """Blocks that have to become free before it can come: its own, and one for each branch here that may grow."""
        block_size = self._seats.pool.block_size
        here = (self._seats.copying, self._seats.running, self._seats.returning)
        num_growing = sum(each.num_growing(block_size) for attempts in here for each in attempts.values())
        return comer.blocks_for_step(block_size) + num_growing - self._seats.pool.num_free

    def _next_waiting(self) -> DecodeSequence | None:
        """Who is to be taken in next, if blocks allow: nobody as long as one that was swapped out wants to go on."""
        comer = next(iter(self._seats.waiting.values()), None)
        if comer is None or self._first_away() is not None:
            return None
        num_taken = sum(len(each.branches) for each in self._seats.taken())
        return comer if num_taken + len(comer.branches) <= self._seats.max_num_seqs else None

    def _first_away(self) -> DecodeSequence | None:
        """The oldest sequence that is swapped out and wants to go on."""
        return min((each for each in self._seats.away.values() if not each.is_parked), key=_order, default=None)

    def _victim_for(self, short: list[tuple[DecodeSequence, Branch]]) -> DecodeSequence | None:
        """Who is to give way to those that need a block; None when enough will be free soon, or nobody has to."""
        if len(short) <= self._num_soon_free():
            return None
        younger = [each for each in self._seats.running.values() if each.order > short[0][0].order]
        return self._choose(self._seats.parked.values()) or self._choose(younger)

    def _choose(self, candidates: Iterable[DecodeSequence]) -> DecodeSequence | None:
        """The latest that the swap space has room for; the latest where it has room for none."""
        latest_first = sorted(candidates, key=_order, reverse=True)
        return next((each for each in latest_first if self._has_slots(each)), next(iter(latest_first), None))

    def _has_slots(self, sequence: DecodeSequence) -> bool:
        return self._seats.swap is not None and sequence.num_blocks <= self._seats.swap.num_free

    def _preempt(self, victim: DecodeSequence, swaps: list[Swap], shed: list[DecodeSequence]) -> bool:
        """Swaps a sequence out or sheds it; False when it is to wait for a swap that runs."""
        if not self._has_slots(victim):
            if self._seats.leaving or self._seats.returning:
                return False
            self._seats.remove(victim.attempt_id)
            self._num_shed += 1
            shed.append(victim)
            return True
        assert self._seats.swap is not None
        (self._seats.parked if victim.is_parked else self._seats.running).pop(victim.attempt_id)
        self._seats.leaving[victim.attempt_id] = victim
        victim.slots = self._seats.swap.allocate(victim.attempt_id, victim.num_blocks)
        self._num_swapped += 1
        self._blocks_out += len(victim.slots)
        swaps.append(_swap(victim, is_out=True))
        return True

    def _call_back(self, swaps: list[Swap], shed: list[DecodeSequence]) -> None:
        """Lets sequences return, the oldest first, and moves parked ones out of the way of who can come next."""
        while (comer := self._first_away()) is not None:
            is_alone = not (self._seats.running or self._seats.copying or self._seats.leaving or self._seats.returning)
            self._clear_way(comer, swaps, shed, may_shed=is_alone)
            if self._num_missing(comer) > 0:
                return
            block_size, num_kept = self._seats.pool.block_size, len(comer.slots)
            block_ids = self._seats.pool.allocate(comer.attempt_id, comer.blocks_for_step(block_size))
            comer.move(block_ids[:num_kept])
            self._seats.returning[comer.attempt_id] = self._seats.away.pop(comer.attempt_id)
            self._blocks_in += num_kept
            swaps.append(_swap(comer, is_out=False))
            comer.extend(block_ids[num_kept:], block_size)
        if (waiting := self._next_waiting()) is not None:
            self._clear_way(waiting, swaps, shed, may_shed=False)

    def _clear_way(
        self, comer: DecodeSequence, swaps: list[Swap], shed: list[DecodeSequence], *, may_shed: bool
    ) -> None:
        """Preempts parked sequences until `comer` has room or soon will have."""
        while self._num_missing(comer) > self._num_soon_free() and (
            victim := self._choose(self._seats.parked.values())
        ):
            if not (may_shed or self._has_slots(victim)) or not self._preempt(victim, swaps, shed):
                return

    def _num_soon_free(self) -> int:
        return sum(each.num_blocks for each in self._seats.leaving.values())


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
