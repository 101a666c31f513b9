"""The source's side of the `grpc` transport, in the prefill worker's server process. Knows no torch.

The server process maps its own engine's segment read-only and reads the blocks itself, so a pull never waits for a
step. It looks at the fence as any reader of the segment does. Of a pool in device memory it maps the host copy; where
there is none the transport is not offered.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from baton.core.errors import InvalidArgumentError
from kv_transfer.errors import StaleLeaseError
from kv_transfer.segment import SegmentView

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from baton.core.model import KVLayout
    from kv_transfer.descriptor import PeerKey, ShmHandle

PIECE_BYTES = 256 * 1024
"""Data of one message at most. Smaller messages cost more calls, larger ones fresh pages of memory at every copy:
this is where a byte costs the least on both sides (`make bench-handover`)."""

_TURN_BYTES = 2**20
"""What a thread reads before it gives the word back to the event loop: a change of threads costs as much as a piece."""

MAX_PART_BYTES = 16 * 2**20
_MESSAGE_OVERHEAD_BYTES = 64
_MAX_CALLS = 8


class LeasedBlocks(Protocol):
    """What a lease lets its reader read."""

    @property
    def lease_id(self) -> str:
        """The lease."""
        ...

    @property
    def slot(self) -> int:
        """Its fence word's index."""
        ...

    @property
    def generation(self) -> int:
        """What the word holds while the lease lives."""
        ...

    @property
    def block_ids(self) -> Sequence[int]:
        """Its blocks, in order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes [first_byte, first_byte + num_bytes) of a lease's blocks laid end to end, in pieces of at most so much."""

    first_byte: int
    num_bytes: int
    max_piece_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes and their CRC-32."""

    data: bytes
    crc32: int


class BlockStream:
    """Reads leased blocks out of the engine's segment. Belongs to one event loop.

    HTTP/2 gives no backpressure to the server, so what a call may have on its way is bounded by its part, and the
    number of calls that are served at a time by `_MAX_CALLS`; further ones wait their turn.
    """

    def __init__(self, peer: PeerKey, layout: KVLayout, handle: ShmHandle, *, max_message_bytes: int) -> None:
        self._peer = peer
        self._layout = layout
        self._handle = handle
        self._max_piece_bytes = min(PIECE_BYTES, max_message_bytes - _MESSAGE_OVERHEAD_BYTES)
        self._turns = asyncio.Semaphore(_MAX_CALLS)
        self._opening = asyncio.Lock()
        self._view: SegmentView | None = None

    async def pieces(self, lease: LeasedBlocks, part: Part) -> AsyncIterator[Piece]:
        """The part, in order. Copies and checksums are made on threads.

        Raises InvalidArgumentError for a part that the lease doesn't have, StaleLeaseError when the lease ends first,
        PeerGoneError when the engine took the segment away.
        """
        num_lease_bytes = len(lease.block_ids) * self._layout.block_bytes
        if not 1 <= part.num_bytes <= MAX_PART_BYTES:
            raise InvalidArgumentError("num_bytes", f"must be from 1 to {MAX_PART_BYTES}")
        if part.first_byte + part.num_bytes > num_lease_bytes:
            raise InvalidArgumentError("first_byte", f"the lease has {num_lease_bytes} bytes")
        if part.max_piece_bytes < 1:
            raise InvalidArgumentError("max_piece_bytes", "must be at least 1")
        piece_bytes = min(part.max_piece_bytes, self._max_piece_bytes)
        async with self._turns:
            view = await self._open()
            end = part.first_byte + part.num_bytes
            step = max(1, _TURN_BYTES // piece_bytes) * piece_bytes
            for start in range(part.first_byte, end, step):
                cut = range(start, min(start + step, end), piece_bytes)
                for piece in await asyncio.to_thread(self._read_some, view, lease, cut, end):
                    yield piece

    def close(self) -> None:
        """Unmaps the segment. No call may be under way."""
        if self._view is not None:
            self._view.close()
            self._view = None

    async def _open(self) -> SegmentView:
        async with self._opening:
            if self._view is None:
                self._view = await asyncio.to_thread(SegmentView.open, self._peer, self._layout, self._handle)
            return self._view

    def _read_some(self, view: SegmentView, lease: LeasedBlocks, cut: range, end: int) -> list[Piece]:
        """The pieces that begin at `cut`, none of which goes beyond `end`."""
        return [self._read(view, lease, start, min(cut.step, end - start)) for start in cut]

    def _read(self, view: SegmentView, lease: LeasedBlocks, start: int, num_bytes: int) -> Piece:
        self._require_fence(view, lease)
        data = b"".join(self._slices(view.blocks, lease.block_ids, start, num_bytes))
        self._require_fence(view, lease)
        return Piece(data, zlib.crc32(data))

    def _slices(self, blocks: memoryview, block_ids: Sequence[int], start: int, num_bytes: int) -> Iterator[memoryview]:
        block_bytes = self._layout.block_bytes
        while num_bytes > 0:
            index, offset = divmod(start, block_bytes)
            length = min(num_bytes, block_bytes - offset)
            address = block_ids[index] * block_bytes + offset
            yield blocks[address : address + length]
            start += length
            num_bytes -= length

    def _require_fence(self, view: SegmentView, lease: LeasedBlocks) -> None:
        if view.fence(lease.slot) != lease.generation:
            raise StaleLeaseError(f"lease {lease.lease_id} ended before its blocks were read")
