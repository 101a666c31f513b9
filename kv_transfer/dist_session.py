"""A reader's conversation with one source over torch.distributed: the store's connection and the communicator.

The store's client has time-outs of its own, but ends a wait by asking the server to end it, and waits for that answer
as long as it takes: a source that is frozen would freeze its readers. So the store is used from a thread of the
session's own, which is left to itself when it does not come back in time.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kv_transfer.dist_link import CALLS, READER_IDLE_S, READER_RANK, Call, Link, local_host
from kv_transfer.errors import TransferFailedError
from kv_transfer.pairs import pair_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.descriptor import DistHandle

Result = TypeVar("Result")

# The thread's own time-outs come first, so that a wait which can end in order does.
_GRACE_S = 0.5


class DistSession:
    """For one thread at a time. Every call ends within about `timeout_s`, by TransferFailedError if need be.

    After that error the session is to be ended: what the source still says would be an answer to something else.
    """

    def __init__(self, handle: DistHandle, secret: bytes, timeout_s: float) -> None:
        self._handle = handle
        self._secret = secret
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._last_word_s = time.monotonic()
        self._epoch = secrets.token_hex(8)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="handover-store", daemon=True).start()
        try:
            self._store = self._bounded(self._connect)
        except TransferFailedError:
            self._jobs.put(None)
            raise

    def call(self, lease_id: str, pieces: tuple[tuple[int, int], ...]) -> Call:
        """Asks the source for a lease's blocks. Returns at once; `answer` has its words."""
        if time.monotonic() - self._last_word_s > READER_IDLE_S:
            self.disconnect()
        call = Call(
            pair=pair_of(self._secret),
            epoch=self._epoch,
            reply=secrets.token_hex(16),
            lease_id=lease_id,
            pieces=pieces,
        )
        self._bounded(lambda: self._store.queue_push(CALLS, call.seal(self._secret)))
        return call

    def answer(self, call: Call, stage: str) -> dict[str, Any]:
        """What the source says, once it does."""
        answer: dict[str, Any] = json.loads(self._bounded(lambda: self._await(f"{call.reply}/{stage}")))
        self._last_word_s = time.monotonic()
        return answer

    def has_answer(self, call: Call, stage: str) -> bool:
        """Whether the source has said something, now."""
        return bool(self._bounded(lambda: self._store.check([f"{call.reply}/{stage}"])))

    def link(self) -> Link:
        """The communicator; the first time it is made, while the source makes its side of it."""
        if self._link is None:
            self._link = self._bounded(self._join)
        return self._link

    def disconnect(self) -> None:
        """Throws the communicator away; the next one is another."""
        self._epoch = secrets.token_hex(8)
        if self._link is not None:
            self._link.abort()
            self._link = None

    def end(self) -> None:
        """Gives everything up, and tells the source so if that can still hear. Waits for nothing."""
        self.disconnect()
        goodbye = Call(pair=pair_of(self._secret), epoch=self._epoch, reply="", lease_id="", pieces=())
        self._jobs.put((lambda: self._store.queue_push(CALLS, goodbye.seal(self._secret)), Future()))
        self._jobs.put(None)

    def _connect(self) -> TCPStore:
        return TCPStore(
            self._handle.host,
            self._handle.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
        )

    def _await(self, key: str) -> bytes:
        self._store.wait([key])
        value: bytes = self._store.get(key)
        self._store.delete_key(key)
        return value

    def _join(self) -> Link:
        store = PrefixStore(f"{pair_of(self._secret)}/{self._epoch}", self._store)
        host = local_host(self._handle.host, self._handle.port)
        return Link(self._handle.transport, store, READER_RANK, host, self._timeout_s)

    def _bounded(self, job: Callable[[], Result]) -> Result:
        result: Future[Result] = Future()
        self._jobs.put((job, result))
        try:
            return result.result(self._timeout_s + _GRACE_S)
        except (RuntimeError, OSError, TimeoutError) as error:
            raise TransferFailedError("the source's rendezvous store does not answer") from error

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, result = item
            try:
                result.set_result(job())
            except Exception as error:
                result.set_exception(error)
