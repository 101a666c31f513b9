"""The source pools that a decode engine process knows, and the one place that reads from them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kv_transfer.errors import PeerGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool
    from kv_transfer.transport import KVReader, ReadResult


class PeerReaders:
    """One `KVReader` for each known life of a prefill worker.

    The server process says which peers there are (`open`, `close`, in the order of its `PeerDirectory`'s calls), so a
    dead peer's memory is given up when it dies and not when its successor appears. Thread-safe.

    `open_reader` makes a reader from what the handshake brought: `lambda pool: ShmReader.open(pool, layout)`.
    """

    def __init__(self, open_reader: Callable[[PeerPool], KVReader]) -> None:
        self._open_reader = open_reader
        self._readers: dict[PeerKey, KVReader] = {}
        self._lock = threading.Lock()

    def open(self, pool: PeerPool) -> None:
        """Makes a peer's pool readable; nothing to do when it is already. Blocks while the pool is mapped.

        Raises what the transport raises: PeerGoneError, PoolMismatchError.
        """
        with self._lock:
            if pool.peer not in self._readers:
                self._readers[pool.peer] = self._open_reader(pool)

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """See `KVReader.read`; PeerGoneError also for a peer that is not open."""
        with self._lock:
            reader = self._readers.get(descriptor.peer)
        if reader is None:
            raise PeerGoneError(f"no pool of {descriptor.peer} is open")
        return reader.read(descriptor, into, block_ids)

    def close(self, peer: PeerKey) -> None:
        """Gives up all that is held of a peer. Harmless when it is not open."""
        with self._lock:
            reader = self._readers.pop(peer, None)
        if reader is not None:
            reader.close()

    def close_all(self) -> None:
        """Gives up every peer."""
        for peer in list(self._readers):
            self.close(peer)
