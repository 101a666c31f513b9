"""Reading a source's blocks directly from its memory, guarded by fence words.

The reader and the source share no lock: the source may end a lease and reuse the blocks in the middle of a copy.
So a copy is made first and believed afterwards, piece by piece: when the lease's fence word still holds the lease's
generation after a piece was copied, then the source had not yet let go of the blocks while it was.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from baton.core.errors import InvalidArgumentError
from kv_transfer.errors import NoTransportError, PeerGoneError, PoolMismatchError, StaleLeaseError
from kv_transfer.transport import ReadResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from baton.core.model import KVLayout
    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey

PIECE_BYTES = 4 * 2**20
"""What is copied between two looks at the fence, and what `close` waits for at most: under a millisecond."""


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

    def close(self) -> None:
        """Gives up the memory."""
        ...


class CopyRun(NamedTuple):
    """Blocks that follow each other on both sides."""

    source: int
    destination: int
    length: int


def copy_runs(source_ids: Sequence[int], destination_ids: Sequence[int]) -> Iterator[CopyRun]:
    """Splits a block-by-block copy into as few runs as there can be, in order."""
    start = 0
    for end in range(1, len(source_ids) + 1):
        length = end - start
        if (
            end == len(source_ids)
            or source_ids[end] != source_ids[start] + length
            or destination_ids[end] != destination_ids[start] + length
        ):
            yield CopyRun(source_ids[start], destination_ids[start], length)
            start = end


class FencedReader:
    """A `KVReader` over memory of the source. Thread-safe: pieces of concurrent reads take turns."""

    def __init__(self, peer: PeerKey, layout: KVLayout, memory: FencedMemory) -> None:
        self._peer = peer
        self._layout = layout
        self._memory = memory
        self._closed = False
        self._released = False
        self._piece_blocks = max(1, PIECE_BYTES // layout.block_bytes)
        self._lock = threading.Lock()

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`."""
        started_s = time.perf_counter()
        destination = self._destination(into, block_ids, len(descriptor.block_ids))
        with self._lock:
            self._require_open()
            self._require_readable(descriptor)
            self._require_fence(descriptor)
        for start in range(0, len(block_ids), self._piece_blocks):
            piece = slice(start, start + self._piece_blocks)
            with self._lock:
                self._require_open()
                _copy(self._memory.blocks, destination, copy_runs(descriptor.block_ids[piece], block_ids[piece]))
                self._require_fence(descriptor)
        return ReadResult(
            transport=self._memory.name,
            num_bytes=len(block_ids) * self._layout.block_bytes,
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
        if descriptor.peer != self._peer:
            raise PoolMismatchError(f"a lease of {descriptor.peer} cannot be read from the pool of {self._peer}")
        descriptor.require_fits(self._layout)
        num_blocks = self._memory.blocks.shape[0]
        if any(not 0 <= block_id < num_blocks for block_id in descriptor.block_ids):
            raise InvalidArgumentError("kv.block_ids", f"must be below {num_blocks}")
        if not 0 <= descriptor.lease_slot < self._memory.num_slots:
            raise InvalidArgumentError("kv.lease_slot", f"must be below {self._memory.num_slots}")
        if descriptor.generation == 0:  # the word of a slot without a lease
            raise InvalidArgumentError("kv.generation", "must not be 0")

    def _destination(self, into: KVPool, block_ids: Sequence[int], num_wanted: int) -> torch.Tensor:
        """The pool's blocks as uint8 [num_blocks, block_bytes], not copied. NoTransportError unless in CPU memory."""
        if into.device.type != "cpu":
            raise NoTransportError(f"{self._memory.name} is read into CPU memory, this pool is on {into.device}")
        assert into.layout == self._layout, "the pool that the handshake was made for"
        assert len(block_ids) == num_wanted, "as many blocks to fill as to read"
        assert all(0 <= block_id < into.num_blocks for block_id in block_ids), "blocks of this pool"
        return flat_blocks(into.tensor)

    def _require_fence(self, descriptor: KVDescriptor) -> None:
        if self._memory.fence(descriptor.lease_slot) != descriptor.generation:
            raise StaleLeaseError(f"lease {descriptor.lease_id} ended before its blocks were read")


def flat_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """A KV pool's tensor [num_blocks, ...] of any element type as uint8 [num_blocks, block_bytes], not copied."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _copy(source: torch.Tensor, destination: torch.Tensor, runs: Iterable[CopyRun]) -> None:
    """Copies runs of blocks with the interpreter's lock released, on this thread alone.

    Not `Tensor.copy_`: that splits each copy over torch's threads and waits for all of them, while the other cores
    are busy with a step, or with another worker's.
    """
    block_bytes = source.shape[1]
    source_address, destination_address = source.data_ptr(), destination.data_ptr()
    for from_id, to_id, length in runs:
        ctypes.memmove(
            destination_address + to_id * block_bytes, source_address + from_id * block_bytes, length * block_bytes
        )
