"""Copies handed-over KV blocks on a thread of its own, so that running sequences keep stepping."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from baton.core.errors import InternalError, OutOfMemoryError, ServingError
from baton.engine.out_of_memory import is_out_of_memory
from decode_worker.movers import CopyDone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool
    from kv_transfer.readers import PeerReaders

_log = logging.getLogger(__name__)


class ThreadCopier:
    """A `Copier`. One thread does everything in order: a peer is open before the first copy from it begins.

    Used by the engine's thread; `wake` is called from the helper thread when a copy has ended.
    """

    def __init__(self, readers: PeerReaders, pool: KVPool, wake: Callable[[], None]) -> None:
        self._readers = readers
        self._pool = pool
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handover")
        self._done: deque[CopyDone] = deque()

    def open_peer(self, pool: PeerPool) -> None:
        """Maps a source's pool. When that fails, each copy from it says so."""
        self._thread.submit(self._open, pool)

    def forget_peer(self, peer: PeerKey) -> None:
        """Unmaps a source's pool after the copies that were started before."""
        self._thread.submit(self._readers.close, peer)

    def start(self, attempt_id: str, kv: KVDescriptor, block_ids: Sequence[int]) -> None:
        """Begins to fill `block_ids`, which nobody else may touch until the copy is done."""
        self._thread.submit(self._copy, attempt_id, kv, block_ids)

    @property
    def has_done(self) -> bool:
        """Whether `take_done` would return something."""
        return bool(self._done)

    def take_done(self) -> list[CopyDone]:
        """The copies that ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Waits for the copy that runs, drops those that don't yet, and gives up all peers."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._readers.close_all()

    def _open(self, pool: PeerPool) -> None:
        try:
            self._readers.open(pool)
        except ServingError as error:
            _log.warning("cannot open the KV pool of %s: %s", pool.peer, error)

    def _copy(self, attempt_id: str, kv: KVDescriptor, block_ids: Sequence[int]) -> None:
        try:
            result = self._readers.read(kv, self._pool, block_ids)
        except ServingError as error:
            self._finish(CopyDone(attempt_id=attempt_id, result=error))
        except Exception as error:
            if is_out_of_memory(error):
                _log.warning("out of memory, one handover is given up: %s", type(error).__name__)
                shed = OutOfMemoryError("a handover does not fit into memory", retry_after_s=1.0)
                self._finish(CopyDone(attempt_id=attempt_id, result=shed))
                return
            _log.exception("a handover failed")
            self._finish(CopyDone(attempt_id=attempt_id, result=InternalError("the handover's copy failed")))
        else:
            self._finish(CopyDone(attempt_id=attempt_id, result=result))

    def _finish(self, done: CopyDone) -> None:
        self._done.append(done)
        self._wake()
