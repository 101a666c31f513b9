"""Handover over gRPC: the way that always works, in the decode engine process.

The engine's copying thread pulls for itself, straight into its pool. The server process would have to pass every byte
on to the engine, through a staging segment and under a protocol of its own, only to save the engine these calls,
which spend their time in system calls, checksums and copies, most of it without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import torch

from baton.core.errors import DeadlineExceededError, NotFoundError, UnavailableError
from baton.engine.block_runs import copy_runs
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kv_transfer.descriptor import Transport
from kv_transfer.destination import Destination, require_readable
from kv_transfer.errors import ChecksumError, PeerGoneError, StaleLeaseError, TransferFailedError
from kv_transfer.transport import ReadResult

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from baton.core.errors import ServingError
    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerPool

PART_BYTES = 4 * 2**20
"""What one call asks for. Two calls are open at a time, so that one's data travels while the other's is taken in:
twice this is the credit that the source has."""

_OPEN_CALLS = 2
_MESSAGE_OVERHEAD_BYTES = 64


class GrpcReader:
    """A `KVReader` over PullBlocks. Thread-safe; reads run side by side.

    Owns `channel`. `from_call` turns a failed call into its ServingError. A part that has not come whole within
    `timeout_s` is taken for a stalled source.
    """

    def __init__(
        self,
        pool: PeerPool,
        channel: grpc.Channel,
        from_call: Callable[[Any], ServingError],
        *,
        max_message_bytes: int,
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._channel = channel
        self._from_call = from_call
        self._max_piece_bytes = max_message_bytes - _MESSAGE_OVERHEAD_BYTES
        self._timeout_s = timeout_s
        self._stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        self._lock = threading.Lock()
        self._calls: set[Any] = set()
        self._closed = False

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`. ChecksumError when a piece is damaged, TransferFailedError when the source stalls."""
        started_s = time.perf_counter()
        require_readable(descriptor, self._pool.peer, self._pool.layout)
        destination = Destination(into, block_ids, self._pool.layout, descriptor.num_tokens)
        num_blocks, block_bytes = len(descriptor.block_ids), self._pool.layout.block_bytes
        first_byte = descriptor.first_block * block_bytes
        pieces = self._pieces(descriptor, first_byte, first_byte + num_blocks * block_bytes)
        try:
            if destination.is_alike and destination.device.type == "cpu":
                _receive(destination, pieces)
            else:
                self._receive_staged(destination, pieces, num_blocks)
        except grpc.RpcError as error:
            raise self._explain(error, descriptor) from error
        finally:
            pieces.close()
        return ReadResult(
            transport=Transport.GRPC.value,
            num_bytes=destination.num_bytes,
            copy_s=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        """See `KVReader.close`. Ends the calls of running reads."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        self._channel.close()

    def _receive_staged(self, destination: Destination, pieces: Iterator[bytes], num_blocks: int) -> None:
        """By way of a buffer, from which the blocks are laid out anew or go to a device."""
        block_bytes = self._pool.layout.block_bytes
        group_blocks = min(num_blocks, max(1, PART_BYTES // block_bytes))
        staging = torch.empty((group_blocks, block_bytes), dtype=torch.uint8)
        rest = b""
        for first in range(0, num_blocks, group_blocks):
            group = staging[: min(group_blocks, num_blocks - first)]
            rest = _fill(group, rest, pieces)
            destination.put(first, group)

    def _pieces(self, descriptor: KVDescriptor, first_byte: int, end: int) -> Generator[bytes]:
        """These bytes of the lease, in order, checked."""
        open_calls: deque[tuple[Any, int]] = deque()
        try:
            for start in range(first_byte, end, PART_BYTES):
                part_bytes = min(PART_BYTES, end - start)
                open_calls.append((self._open(descriptor, start, part_bytes), part_bytes))
                if len(open_calls) == _OPEN_CALLS:
                    yield from _checked(*open_calls[0])
                    self._forget(open_calls.popleft()[0])
            while open_calls:
                yield from _checked(*open_calls[0])
                self._forget(open_calls.popleft()[0])
        finally:
            for call, _ in open_calls:
                call.cancel()
                self._forget(call)

    def _open(self, descriptor: KVDescriptor, start: int, num_bytes: int) -> Any:
        request = kv_transfer_pb2.PullBlocksRequest(
            lease_id=descriptor.lease_id,
            incarnation=descriptor.incarnation,
            pair_secret=self._pool.secret,
            first_byte=start,
            num_bytes=num_bytes,
            max_piece_bytes=self._max_piece_bytes,
        )
        with self._lock:
            if self._closed:
                raise PeerGoneError(f"the pool of {self._pool.peer} was given up")
            call = self._stub.PullBlocks(request, timeout=self._timeout_s)
            self._calls.add(call)
        return call

    def _forget(self, call: Any) -> None:
        with self._lock:
            self._calls.discard(call)

    def _explain(self, failure: grpc.RpcError, descriptor: KVDescriptor) -> ServingError:
        if self._closed:
            return PeerGoneError(f"the pool of {self._pool.peer} was given up")
        error = self._from_call(failure)
        if isinstance(error, NotFoundError) or error.reason == StaleLeaseError.default_reason:
            return StaleLeaseError(f"lease {descriptor.lease_id} ended before its blocks were read")
        if isinstance(error, DeadlineExceededError):
            return TransferFailedError(f"{self._pool.peer} did not send within {self._timeout_s:g} s")
        if isinstance(error, UnavailableError):
            return PeerGoneError(f"{self._pool.peer} cannot be reached")
        return error


def _checked(call: Any, num_bytes: int) -> Iterator[bytes]:
    """The call's pieces. ChecksumError when one is damaged, TransferFailedError when they are not `num_bytes`."""
    for piece in call:
        data = piece.data  # each look at it makes a copy
        if zlib.crc32(data) != piece.crc32:
            raise ChecksumError("a piece of a KV cache arrived damaged")
        num_bytes -= len(data)
        yield data
    if num_bytes != 0:
        raise TransferFailedError(f"a part of a KV cache ended {num_bytes} bytes short")


def _receive(destination: Destination, pieces: Iterator[bytes]) -> None:
    """Right into the reader's blocks."""
    rest = b""
    for run in copy_runs(range(len(destination.block_ids)), destination.block_ids):
        rest = _fill(destination.blocks[run.destination : run.destination + run.length], rest, pieces)


def _fill(group: torch.Tensor, rest: bytes, pieces: Iterator[bytes]) -> bytes:
    """Fills `group`, one stretch of memory, from `rest` and then `pieces`; returns what is left of the last piece."""
    address, missing = group.data_ptr(), group.numel()
    while missing:
        data = rest or next(pieces)
        length = min(len(data), missing)
        ctypes.memmove(address, data, length)
        address, missing, rest = address + length, missing - length, data[length:]
    return rest
