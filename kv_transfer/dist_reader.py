"""The reader's side of the `nccl` and `gloo` transports, in the decode engine process."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from baton.engine.block_runs import copy_runs
from kv_transfer.descriptor import Transport
from kv_transfer.destination import Destination, require_readable
from kv_transfer.dist_link import Link, checksum, pieces_of
from kv_transfer.dist_session import DistSession
from kv_transfer.errors import ChecksumError, NoTransportError, PeerGoneError, StaleLeaseError, TransferFailedError
from kv_transfer.transport import ReadResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import DistHandle, KVDescriptor, PeerPool

_MAX_MESSAGES_UNDER_WAY = 2


class DistReader:
    """A `KVReader` over torch.distributed. Thread-safe: a pair has one communicator, so reads take turns.

    Where blocks lie alike on both sides they are received right into the reader's pool, but by gloo only if that is in
    host memory. A read that failed has cost
    the session; the next one begins another. TransferFailedError from the constructor when there is no source.
    """

    def __init__(self, pool: PeerPool, handle: DistHandle, *, timeout_s: float) -> None:
        self._pool = pool
        self._handle = handle
        self._device_type = "cpu" if handle.transport is Transport.GLOO else "cuda"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._session: DistSession | None = DistSession(handle, pool.secret, timeout_s)

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`. TransferFailedError when the source stalls or breaks off, ChecksumError on damage."""
        started_s = time.perf_counter()
        if self._device_type == "cuda" and into.device.type != "cuda":
            raise NoTransportError(f"{self._handle.transport.value} does not reach a pool on {into.device}")
        require_readable(descriptor, self._pool.peer, self._pool.layout)
        destination = Destination(into, block_ids, self._pool.layout, descriptor.num_tokens)
        with self._lock:
            try:
                self._require_open()
                if self._session is None:
                    self._session = DistSession(self._handle, self._pool.secret, self._timeout_s)
                self._read(self._session, descriptor, destination)
            except (TransferFailedError, PeerGoneError):
                self._end_session()
                raise
            finally:
                if self._closed:
                    self._end_session()
        return ReadResult(
            transport=self._handle.transport.value,
            num_bytes=destination.num_bytes,
            copy_s=time.perf_counter() - started_s,
        )

    def close(self) -> None:
        """See `KVReader.close`. Waits for nothing: a read that runs ends at its next piece, or by its time-out."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._end_session()
            finally:
                self._lock.release()

    def _read(self, session: DistSession, descriptor: KVDescriptor, destination: Destination) -> None:
        runs = list(_runs(descriptor.block_ids, destination))
        pieces = pieces_of(runs, self._pool.layout.block_bytes)
        asked = tuple((descriptor.first_block + first, count) for first, count in pieces)
        call = session.call(descriptor.lease_id, asked)
        _require_live(descriptor, session.answer(call, "go"))
        try:
            checksums = self._receive(session.link(), destination, pieces)
        except TransferFailedError:
            # Perhaps the source broke off because the lease ended.
            if session.has_answer(call, "done"):
                session.disconnect()
                _require_live(descriptor, session.answer(call, "done"))
            raise
        answer = session.answer(call, "done")
        if answer["stale"]:  # and the source has given the communicator up
            session.disconnect()
        _require_live(descriptor, answer)
        if answer["checksums"] != checksums:
            raise ChecksumError("a piece of a KV cache arrived damaged")

    def _receive(self, link: Link, destination: Destination, pieces: Sequence[tuple[int, int]]) -> list[int | None]:
        """Receives the pieces to where they belong; returns their checksums."""
        under_way: deque[tuple[Any, int, torch.Tensor]] = deque()
        checksums: list[int | None] = []

        def take() -> None:
            self._require_open()
            work, first, buffer = under_way.popleft()
            link.finish(work)
            checksums.append(checksum(buffer))
            if not self._is_direct(destination):
                destination.put(first, buffer.view(-1, self._pool.layout.block_bytes))

        for first, count in pieces:
            buffer = self._buffer(destination, first, count)
            under_way.append((link.start_receive(buffer), first, buffer))
            if len(under_way) == _MAX_MESSAGES_UNDER_WAY:
                take()
        while under_way:
            take()
        return checksums

    def _buffer(self, destination: Destination, first: int, count: int) -> torch.Tensor:
        if self._is_direct(destination):
            start = destination.block_ids[first]
            return destination.blocks[start : start + count].view(-1)
        size = count * self._pool.layout.block_bytes
        device = "cpu" if self._device_type == "cpu" else destination.device
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _is_direct(self, destination: Destination) -> bool:
        return destination.is_alike and destination.device.type == self._device_type

    def _require_open(self) -> None:
        if self._closed:
            raise PeerGoneError(f"the pool of {self._pool.peer} was given up")

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None


def _require_live(descriptor: KVDescriptor, answer: dict[str, Any]) -> None:
    if answer["stale"]:
        raise StaleLeaseError(f"lease {descriptor.lease_id} ended before its blocks were read")


def _runs(source_ids: Sequence[int], destination: Destination) -> Iterator[tuple[int, int]]:
    """(index of the first block, number of blocks) of what follows each other in the source and, if alike, here."""
    here = destination.block_ids if destination.is_alike else range(len(source_ids))
    first = 0
    for run in copy_runs(source_ids, here):
        yield first, run.length
        first += run.length
