"""Where each attempt of the decode worker is, and the blocks and slots that go back when it leaves. No policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.engine.block_pool import BlockPool
    from decode_worker.sequence import DecodeSequence


@dataclass(slots=True, kw_only=True)
class Seats:
    """An attempt is in exactly one of the dictionaries, by its id; there are `max_num_seqs` places in the batch.

    `swap` counts the blocks of the swap space; None: there is none. Those in `leaving` are on their way there, those in
    `away` are there, those in `returning` on their way back. `condemned` have been removed while something reads or
    writes their blocks.
    """

    pool: BlockPool
    swap: BlockPool | None
    max_num_seqs: int
    waiting: dict[str, DecodeSequence] = field(default_factory=dict)
    copying: dict[str, DecodeSequence] = field(default_factory=dict)
    running: dict[str, DecodeSequence] = field(default_factory=dict)
    parked: dict[str, DecodeSequence] = field(default_factory=dict)
    leaving: dict[str, DecodeSequence] = field(default_factory=dict)
    away: dict[str, DecodeSequence] = field(default_factory=dict)
    returning: dict[str, DecodeSequence] = field(default_factory=dict)
    condemned: set[str] = field(default_factory=set)

    def taken(self) -> Iterator[DecodeSequence]:
        """Those whose branches have their places in the batch, also where they are not in it now."""
        for attempts in (self.copying, self.running, self.parked, self.leaving, self.away, self.returning):
            yield from attempts.values()

    def remove(self, attempt_id: str) -> DecodeSequence | None:
        """Forgets an attempt and frees what it holds; None when it is not here (any more, or yet). Not during a step.

        The blocks of an attempt that is being copied are still written to or read: it is condemned, and `end_copy` or
        `end_swap` frees them.
        """
        if attempt_id in self.copying or attempt_id in self.leaving or attempt_id in self.returning:
            self.condemned.add(attempt_id)
            return None
        for attempts in (self.waiting, self.running, self.parked):
            if sequence := attempts.pop(attempt_id, None):
                self.free_blocks(sequence)
                return sequence
        if sequence := self.away.pop(attempt_id, None):
            self.free_slots(sequence)
            return sequence
        return None

    def end_branch(self, sequence: DecodeSequence, choice: int) -> None:
        """Takes a branch out and frees what it has to itself, the last one all; harmless when it has left."""
        branch = sequence.find(choice)
        if branch is None:
            return
        sequence.num_steps = max(sequence.num_steps, branch.num_steps)
        if len(sequence.branches) == 1:
            self.free_blocks(sequence)
        else:
            self.pool.free(sequence.attempt_id, branch.block_table[sequence.num_shared :])
        sequence.branches.remove(branch)

    def free_blocks(self, sequence: DecodeSequence) -> None:
        """Frees all blocks of a sequence. Not for one that is away: its tables name slots."""
        self.pool.free(sequence.attempt_id, sequence.blocks)
        for branch in sequence.branches:
            branch.block_table = []

    def free_slots(self, sequence: DecodeSequence) -> None:
        """Frees its slots."""
        if self.swap is not None:
            self.swap.free(sequence.attempt_id, sequence.slots)
            sequence.slots = []
