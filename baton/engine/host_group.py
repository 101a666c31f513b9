"""Sums and joins between the ranks of one host, through memory that all of them have mapped.

    a line a rank    how far it has come, a 64-bit word
    a line a rank    the epoch in which it left, a 64-bit word
    page-aligned     two slots a rank, SLOT_BYTES each

A rank puts its part into one of its slots, says so, and reads the others' once all have. The next exchange uses the
other slot: a rank that gets as far as the one after that knows that all have read this one. So one round of words is
enough, and no lock is needed. Loads and stores of words are single 8-byte moves, seen in program order with the copies
around them, as x86-64 guarantees.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import TYPE_CHECKING

import torch

from baton.engine.rank_group import GroupBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.host_memory import SharedMemory
    from baton.engine.sharding import Shard

SLOT_BYTES = 1 << 20

_LINE_BYTES = 64
_WORDS_A_LINE = _LINE_BYTES // 8
_EPOCH_SHIFT = 40
# Ranks in step are microseconds apart: looking again is cheaper than sleeping. One that was preempted is not.
_LOOKS = 200
_NAP_S = 0.0001


class HostGroup:
    """Implements `RankGroup` on CPUs. `memory` is `num_bytes(shard.size)` of zeroes at first, the same for all ranks.

    `check` is called now and then while others are waited for, and may raise.
    """

    def __init__(
        self, shard: Shard, memory: SharedMemory, *, timeout_s: float, check: Callable[[], None] | None = None
    ) -> None:
        self.shard = shard
        self._timeout_s = timeout_s
        self._check = check
        self._mapped = memory.map()
        num_words_bytes = _words_bytes(shard.size)
        self._words = (ctypes.c_uint64 * (num_words_bytes // 8)).from_address(self._mapped.data_ptr())
        self._slots = self._mapped[num_words_bytes:].view(2, shard.size, SLOT_BYTES)
        self._others = [rank for rank in range(shard.size) if rank != shard.rank]
        self._epoch = 0
        self._place = 0

    @staticmethod
    def num_bytes(size: int) -> int:
        """Memory that a group of `size` ranks needs."""
        return _words_bytes(size) + 2 * size * SLOT_BYTES

    def join(self, epoch: int) -> None:
        """See `RankGroup.join`."""
        self.leave()
        self._epoch, self._place = epoch, epoch << _EPOCH_SHIFT
        self._meet()

    def leave(self) -> None:
        """See `RankGroup.leave`."""
        self._words[(self.shard.size + self.shard.rank) * _WORDS_A_LINE] = self._epoch

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `RankGroup.sum`. In the order of the ranks, so that no element's result depends on where it stands."""
        flat, at_a_time = x.view(-1), SLOT_BYTES // x.element_size()
        for first in range(0, len(flat), at_a_time):
            piece = flat[first : first + at_a_time]
            slots = self._exchange(piece)
            torch.add(slots[0, : len(piece)], slots[1, : len(piece)], out=piece)
            for rank in range(2, self.shard.size):
                piece += slots[rank, : len(piece)]
        return x

    def side_by_side(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """See `RankGroup.side_by_side`."""
        rows, cuts = len(part), self.shard.cuts(total)
        joined = torch.empty(rows, total, dtype=part.dtype)
        rows_at_a_time = max(1, SLOT_BYTES // (max(cut.count for cut in cuts) * part.element_size()))
        for first in range(0, rows, rows_at_a_time):
            own = part[first : first + rows_at_a_time].contiguous()
            slots = self._exchange(own.view(-1))
            for slot, cut in zip(slots, cuts, strict=True):
                found = slot[: len(own) * cut.count].view(len(own), cut.count)
                joined[first : first + len(own), cut.first : cut.first + cut.count] = found
        return joined

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        """Shows `piece` to the others; all ranks' slots [size, elements], in its dtype, once they are there."""
        self._place += 1
        slots = self._slots[self._place % 2].view(piece.dtype)
        slots[self.shard.rank, : len(piece)] = piece
        self._meet()
        return slots

    def _meet(self) -> None:
        """Says how far this rank is, and returns when all others are as far."""
        self._words[self.shard.rank * _WORDS_A_LINE] = self._place
        give_up_at_s = None
        for rank in self._others:
            word = rank * _WORDS_A_LINE
            looks = 0
            while self._words[word] < self._place:
                looks += 1
                if looks < _LOOKS:
                    os.sched_yield()
                    continue
                now_s = time.monotonic()
                give_up_at_s = give_up_at_s or now_s + self._timeout_s
                self._require_whole(rank, late=now_s > give_up_at_s)
                time.sleep(_NAP_S)

    def _require_whole(self, rank: int, *, late: bool) -> None:
        lines = range(self.shard.size, 2 * self.shard.size)
        if any(self._words[line * _WORDS_A_LINE] >= self._epoch for line in lines):
            raise GroupBrokenError("a rank has left")
        if late:
            raise GroupBrokenError(f"rank {rank} is {self._timeout_s:g} s behind")
        if self._check is not None:
            self._check()


def _words_bytes(size: int) -> int:
    return -(-2 * size * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
