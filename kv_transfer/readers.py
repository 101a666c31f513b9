"""The source pools that a decode engine process knows, and the one place that reads from them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from baton.core.errors import ServingError
from kv_transfer.errors import NoTransportError, PeerGoneError, TransferFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool, PoolHandle
    from kv_transfer.transport import KVReader, ReadResult

_log = logging.getLogger(__name__)


class PeerReaders:
    """One `KVReader` for each known life of a prefill worker.

    The server process says which peers there are (`open`, `close`, in the order of its `PeerDirectory`'s calls), so a
    dead peer's memory is given up when it dies and not when its successor appears. Thread-safe.

    `open_reader` makes a reader from one of the handles that the handshake brought. Where a way cannot be opened, or
    breaks during a read, the next one is taken, for that peer and for as long as it is known, and a warning says so.
    """

    def __init__(self, open_reader: Callable[[PeerPool, PoolHandle], KVReader]) -> None:
        self._open_reader = open_reader
        self._ways: dict[PeerKey, _Ways] = {}
        self._lock = threading.Lock()

    def open(self, pool: PeerPool) -> None:
        """Makes a peer's pool readable; nothing to do when it is already. Blocks while the pool is mapped.

        Raises what the last of its ways raises: PeerGoneError, PoolMismatchError, NoTransportError.
        """
        with self._lock:
            if pool.peer not in self._ways:
                self._ways[pool.peer] = _Ways(pool, self._open_reader)

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`; PeerGoneError also for a peer that is not open."""
        while True:
            with self._lock:
                ways = self._ways.get(descriptor.peer)
            if ways is None:
                raise PeerGoneError(f"no pool of {descriptor.peer} is open")
            reader = ways.reader
            try:
                return reader.read(descriptor, into, block_ids)
            except TransferFailedError as error:
                if not ways.give_up(reader, error):
                    raise

    def close(self, peer: PeerKey) -> None:
        """Gives up all that is held of a peer. Harmless when it is not open."""
        with self._lock:
            ways = self._ways.pop(peer, None)
        if ways is not None:
            ways.close()

    def close_all(self) -> None:
        """Gives up every peer."""
        for peer in list(self._ways):
            self.close(peer)


class _Ways:
    """The ways to one peer's pool, of which one is in use."""

    def __init__(self, pool: PeerPool, open_reader: Callable[[PeerPool, PoolHandle], KVReader]) -> None:
        self._pool = pool
        self._open_reader = open_reader
        self._untried = list(pool.handles)
        self._lock = threading.Lock()
        self._closed = False
        self.reader = self._open_next(NoTransportError(f"no way leads to the pool of {pool.peer}"))

    def give_up(self, reader: KVReader, error: ServingError) -> bool:
        """Leaves the way that `reader` stands for; False when there is no other."""
        with self._lock:
            if self.reader is not reader:  # another read has done it
                return True
            if self._closed or not self._untried:
                return False
            reader.close()
            self.reader = self._open_next(error)
            return True

    def close(self) -> None:
        # Outside the lock: a way that is being opened must not hold up whoever gives the peer up.
        self._closed = True
        self.reader.close()
        with self._lock:
            self.reader.close()

    def _open_next(self, error: ServingError) -> KVReader:
        while self._untried:
            handle = self._untried.pop(0)
            try:
                reader = self._open_reader(self._pool, handle)
            except ServingError as failure:
                error = failure
                _log.warning("%s does not reach %s: %s", handle.transport.value, self._pool.peer, failure)
            else:
                if len(self._untried) + 1 < len(self._pool.handles):
                    _log.warning(
                        "the KV caches of %s come over %s from now on: %s",
                        self._pool.peer,
                        handle.transport.value,
                        error,
                    )
                return reader
        raise error
