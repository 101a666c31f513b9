"""Handover through shared memory of one host: the CPU twin of CUDA IPC.

The source's KV pool lies in a segment (`kv_transfer.segment`) that readers map read-only, once a pair of workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch

    from baton.core.model import KVLayout
    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerPool, ShmHandle
    from kv_transfer.lease import FenceTable
    from kv_transfer.transport import ReadResult


class ShmPool:
    """The source's side: owns the segment, in the prefill engine process."""

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, *, incarnation: str, num_slots: int) -> Self:
        """Makes the segment, its memory allocated. StartupError when it does not fit. Reaps dead owners' segments."""
        raise NotImplementedError

    @property
    def handle(self) -> ShmHandle:
        """What a reader needs; goes out with the handshake."""
        raise NotImplementedError

    @property
    def storage(self) -> torch.Tensor:
        """The blocks: flat uint8, num_blocks * block_bytes, for `KVPool(layout, num_blocks, storage)`."""
        raise NotImplementedError

    @property
    def fences(self) -> FenceTable:
        """The fence words, for `LeaseTable(fences, clock, lease_s=...)`."""
        raise NotImplementedError

    def close(self) -> None:
        """Clears all fence words and unlinks the segment. Idempotent."""
        raise NotImplementedError


class ShmReader:
    """The reader's side (a `KVReader`): a source's pool mapped read-only, in the decode engine process."""

    @classmethod
    def open(cls, pool: PeerPool, layout: KVLayout) -> Self:
        """Maps the segment. PeerGoneError when it is gone, PoolMismatchError when it is not what `pool` says."""
        raise NotImplementedError

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`."""
        raise NotImplementedError

    def close(self) -> None:
        """See `KVReader.close`."""
        raise NotImplementedError
