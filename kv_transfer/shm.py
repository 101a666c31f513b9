"""Handover through shared memory of one host: the CPU twin of CUDA IPC.

The source's KV pool lies in a segment (`kv_transfer.segment`); each reader maps it read-only, once a pair of workers.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import TYPE_CHECKING

import torch

from baton.engine.host_memory import SharedMemory
from kv_transfer.destination import copy_on_cpu
from kv_transfer.fenced import FencedReader
from kv_transfer.segment import Segment, SegmentSpec, SegmentView, reap_stale_segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from baton.core.model import KVLayout
    from baton.engine.block_runs import CopyRun
    from kv_transfer.descriptor import PeerPool, ShmHandle
    from kv_transfer.destination import Move
    from kv_transfer.lease import FenceTable


class ShmPool:
    """The source's side: owns the segment, in the prefill engine process."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._storage = torch.frombuffer(segment.blocks, dtype=torch.uint8)

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, *, incarnation: str, num_slots: int) -> Self:
        """Makes the segment, its memory allocated; StartupError when it does not fit.

        First unlinks what dead owners left behind: a predecessor's pool may be the very memory that is missing.
        """
        reap_stale_segments()
        spec = SegmentSpec(layout=layout, num_blocks=num_blocks, num_slots=num_slots, incarnation=incarnation)
        return cls(Segment.create(spec))

    @property
    def handle(self) -> ShmHandle:
        """What a reader needs; goes out with the handshake."""
        return self._segment.handle

    @property
    def storage(self) -> torch.Tensor:
        """The blocks: flat uint8 [num_blocks * block_bytes], for `KVPool(layout, num_blocks, storage)`."""
        return self._storage

    def share(self) -> SharedMemory:
        """The same memory for child processes that compute into it; the caller closes it."""
        return SharedMemory(self._segment.reopen(), self._segment.blocks_offset, self._storage.numel())

    @property
    def fences(self) -> FenceTable:
        """The fence words, for `LeaseTable(fences, clock, lease_s=...)`."""
        return self._segment

    def close(self) -> None:
        """Clears all fence words and unlinks the segment. Repeating it is harmless.

        `storage` stays usable for whoever still holds it.
        """
        self._segment.close()


class ShmReader(FencedReader):
    """The reader's side: a source's pool mapped read-only, in the decode engine process."""

    @classmethod
    def open(cls, pool: PeerPool, handle: ShmHandle, move: Move = ctypes.memmove) -> Self:
        """Maps the segment: blocks for about 0.1 s a GiB. Whole blocks are copied by `move`.

        PeerGoneError when it is gone, NoTransportError when this user may not read it, PoolMismatchError when it is
        not what `pool` and `handle` say.
        """
        return cls(pool.peer, pool.layout, _MappedBlocks(SegmentView.open(pool.peer, pool.layout, handle), move))


class _MappedBlocks:
    """A mapped segment as torch sees it (a `FencedMemory`)."""

    name = "shm"

    def __init__(self, view: SegmentView, move: Move) -> None:
        self._view = view
        self._move = move
        with warnings.catch_warnings():
            # torch warns that the buffer is not writable. That is the point: a write through it is a fault.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
            flat = torch.frombuffer(view.blocks, dtype=torch.uint8)
        self._blocks: torch.Tensor | None = flat.view(view.num_blocks, -1)

    @property
    def num_slots(self) -> int:
        return self._view.num_slots

    @property
    def blocks(self) -> torch.Tensor:
        assert self._blocks is not None, "the mapping is closed"
        return self._blocks

    def fence(self, slot: int) -> int:
        return self._view.fence(slot)

    def copy(self, destination: torch.Tensor, runs: Iterable[CopyRun]) -> None:
        copy_on_cpu(self.blocks, destination, runs, self._move)

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self.blocks[list(block_ids)]

    def close(self) -> None:
        # torch does not tell the mapping that it looks at it: its view goes first.
        self._blocks = None
        self._view.close()
