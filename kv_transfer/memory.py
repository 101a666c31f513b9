"""Handover inside one process: the fake that tests and simulations use instead of a real transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kv_transfer.destination import copy_on_cpu
from kv_transfer.fenced import FencedReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.core.model import KVLayout
    from baton.engine.block_runs import CopyRun
    from kv_transfer.descriptor import PeerKey
    from kv_transfer.lease import FenceTable
    from kv_transfer.transport import KVReader


class MemoryPool:
    """A source's pool in plain memory, with the shape of `ShmPool`. It is its own fence table."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, peer: PeerKey, num_slots: int) -> None:
        self._layout = layout
        self._peer = peer
        self._words = [0] * num_slots
        self.storage = torch.zeros(num_blocks * layout.block_bytes, dtype=torch.uint8)

    @property
    def fences(self) -> FenceTable:
        """The fence words."""
        return self

    @property
    def num_slots(self) -> int:
        """Fence words."""
        return len(self._words)

    def store(self, slot: int, word: int) -> None:
        """Sets a slot's fence word."""
        self._words[slot] = word

    def open_reader(self) -> KVReader:
        """A reader of this pool. Any number may be open."""
        return FencedReader(
            self._peer, self._layout, _Shared(self.storage.view(-1, self._layout.block_bytes), self._words)
        )

    def close(self) -> None:
        """Clears all fence words."""
        self._words[:] = [0] * len(self._words)


class _Shared:
    """What a reader sees of the pool (a `FencedMemory`)."""

    name = "memory"

    def __init__(self, blocks: torch.Tensor, words: list[int]) -> None:
        self.blocks = blocks
        self.num_slots = len(words)
        self._words = words

    def fence(self, slot: int) -> int:
        return self._words[slot]

    def copy(self, destination: torch.Tensor, runs: Iterable[CopyRun]) -> None:
        copy_on_cpu(self.blocks, destination, runs)

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self.blocks[list(block_ids)]

    def close(self) -> None:
        del self.blocks
