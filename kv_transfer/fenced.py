"""Reading a source's blocks directly from its memory, guarded by fence words.

The reader and the source share no lock: the source may end a lease and reuse the blocks in the middle of a copy.
So a copy is made first and believed afterwards, piece by piece: when the lease's fence word still holds the lease's
generation after a piece was copied, then the source had not yet let go of the blocks while it was.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from baton.core.errors import InvalidArgumentError
from baton.engine.block_runs import copy_runs
from kv_transfer.destination import Destination, require_readable
from kv_transfer.errors import NoTransportError, PeerGoneError, StaleLeaseError
from kv_transfer.transport import ReadResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from baton.core.model import KVLayout
    from baton.engine.block_runs import CopyRun
    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey

PIECE_BYTES = 256 * 2**20
"""What is copied between two looks at the fence, or up to twice that, and what `close` waits for: some tens of
milliseconds.

So much, because where there is no compiler for `NativeMove` a long copy in one go is faster than in parts: from a size
that depends on the caches, at most three quarters of 256 MiB on the machines that were looked at, the C library's copy
writes around them."""

BUFFERED_PIECE_BYTES = 4 * 2**20
"""The same for blocks that go through a buffer, to be laid out anew or on their way to a device."""


# Host memory fills a pool on a device too, by way of a buffer.
_THROUGH = {"cpu": "cuda"}


class FencedMemory(Protocol):
    """A source's blocks and fence words, as this process can address them."""

    @property
    def name(self) -> str:
        """Name of the transport, for people."""
        ...

    @property
    def num_slots(self) -> int:
        """Fence words."""
        ...

    @property
    def blocks(self) -> torch.Tensor:
        """The blocks: uint8 [num_blocks, block_bytes]. Not to be kept beyond `close`."""
        ...

    def fence(self, slot: int) -> int:
        """A slot's fence word, freshly read from the source's memory."""
        ...

    def copy(self, destination: torch.Tensor, runs: Iterable[CopyRun]) -> None:
        """Copies runs of blocks to `destination`, uint8 [num_blocks, block_bytes]; done when it returns."""
        ...

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        """A copy of some blocks, in order: uint8 [n, block_bytes]."""
        ...

    def close(self) -> None:
        """Gives up the memory."""
        ...


class FencedReader:
    """A `KVReader` over memory of the source, whose blocks lie as in `layout`.

    Thread-safe: pieces of concurrent reads take turns.
    """

    def __init__(self, peer: PeerKey, layout: KVLayout, memory: FencedMemory) -> None:
        self._peer = peer
        self._layout = layout
        self._memory = memory
        self._closed = False
        self._released = False
        self._device_type = memory.blocks.device.type
        self._lock = threading.Lock()

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`."""
        started_s = time.perf_counter()
        if into.device.type not in (self._device_type, _THROUGH.get(self._device_type)):
            raise NoTransportError(
                f"{self._memory.name} is read into {self._device_type} memory, this pool is on {into.device}"
            )
        with self._lock:
            self._require_open()
            self._require_readable(descriptor)
            self._require_fence(descriptor)
        destination = Destination(into, block_ids, self._layout, descriptor.num_tokens)
        piece_blocks = self._piece_blocks(destination, len(descriptor.block_ids))
        for start in range(0, len(descriptor.block_ids), piece_blocks):
            with self._lock:
                self._require_open()
                self._copy(destination, start, descriptor.block_ids[start : start + piece_blocks])
                self._require_fence(descriptor)
        return ReadResult(
            transport=self._memory.name,
            num_bytes=destination.num_bytes,
            copy_s=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        """See `KVReader.close`."""
        # Set before the lock is asked for: a lock is not fair, and a running read could take it again and again.
        self._closed = True
        with self._lock:
            if not self._released:
                self._released = True
                self._memory.close()

    def _require_open(self) -> None:
        if self._closed:
            raise PeerGoneError(f"the pool of {self._peer} was given up")

    def _require_readable(self, descriptor: KVDescriptor) -> None:
        require_readable(descriptor, self._peer, self._layout)
        num_blocks = self._memory.blocks.shape[0]
        if any(not 0 <= block_id < num_blocks for block_id in descriptor.block_ids):
            raise InvalidArgumentError("kv.block_ids", f"must be below {num_blocks}")
        if not 0 <= descriptor.lease_slot < self._memory.num_slots:
            raise InvalidArgumentError("kv.lease_slot", f"must be below {self._memory.num_slots}")

    def _piece_blocks(self, destination: Destination, num_blocks: int) -> int:
        """Cuts evenly, so that no small rest is left: the pieces have up to twice the size that they are to have."""
        is_direct = destination.is_alike and destination.device.type == self._device_type
        piece_bytes = PIECE_BYTES if is_direct else BUFFERED_PIECE_BYTES
        num_pieces = max(1, min(num_blocks, num_blocks * self._layout.block_bytes // piece_bytes))
        return -(-num_blocks // num_pieces)

    def _copy(self, destination: Destination, first: int, source_ids: Sequence[int]) -> None:
        if destination.is_alike and destination.device.type == self._device_type:
            ids = destination.block_ids[first : first + len(source_ids)]
            self._memory.copy(destination.blocks, copy_runs(source_ids, ids))
        else:
            destination.put(first, self._memory.gather(source_ids))

    def _require_fence(self, descriptor: KVDescriptor) -> None:
        if self._memory.fence(descriptor.lease_slot) != descriptor.generation:
            raise StaleLeaseError(f"lease {descriptor.lease_id} ended before its blocks were read")
