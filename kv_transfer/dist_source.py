"""The source's side of the `nccl` and `gloo` transports, on threads of the prefill engine process.

The engine's own thread takes no part: these read its pool as a reader of shared memory does, and know from the lease
table, where a lease is gone before anything happens to its blocks, whether what they sent was still the lease's.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets as random
import socket
import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kv_transfer.descriptor import DistHandle, Transport
from kv_transfer.dist_link import CALLS, SOURCE_IDLE_S, SOURCE_RANK, Call, Link, checksum
from kv_transfer.errors import TransferFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kv_transfer.lease import Lease
    from kv_transfer.pairs import PairSecrets
    from kv_transfer.source import DistPlace

_log = logging.getLogger(__name__)

_UNTIL_A_CALL_COMES = timedelta(days=1)
_MAX_CALLS_WAITING = 64
_MAX_MESSAGES_UNDER_WAY = 2
_END_S = 2.0


class DistSource:
    """Serves calls from the moment it is made until `close`.

    `blocks` is the pool, uint8 [num_blocks, block_bytes]; `find` is `LeaseTable.find`.
    """

    def __init__(
        self,
        transport: Transport,
        blocks: torch.Tensor,
        find: Callable[[str], Lease | None],
        secrets: PairSecrets,
        place: DistPlace,
    ) -> None:
        self.transport = transport
        self.blocks = blocks
        self.place = place
        self._find = find
        self._secrets = secrets
        self._store = _listen(place)
        self.handle = DistHandle(host=place.advertised_host, port=self._store.port, transport=transport)
        self._lock = threading.Lock()
        self._pair_of: dict[str, str] = {}
        self._senders: dict[str, _PairSender] = {}
        self._stop_word = random.token_bytes(32)
        self._listener = threading.Thread(target=self._take_calls, name="handover-calls", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Takes no more calls and gives up every communicator. Waits a little for those that send."""
        self._store.queue_push(CALLS, self._stop_word)
        self._listener.join(_END_S)
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.end()
        for sender in senders:
            sender.join(_END_S)

    def lease_of(self, call: Call) -> Lease | None:
        """The lease that the call names, if it lives and no other pair asked for it first."""
        with self._lock:
            self._pair_of = {lease_id: pair for lease_id, pair in self._pair_of.items() if self._find(lease_id)}
            lease = self._find(call.lease_id)
            if lease is None or self._pair_of.setdefault(call.lease_id, call.pair) != call.pair:
                return None
            return lease

    def is_live(self, lease: Lease) -> bool:
        """Whether the lease has not ended."""
        found = self._find(lease.lease_id)
        return found is not None and found.generation == lease.generation

    def reply(self, call: Call, stage: str, **words: Any) -> None:
        """Tells the reader something; it waits for `stage`."""
        self._store.set(f"{call.reply}/{stage}", json.dumps(words))

    def forget_replies(self, call: Call) -> None:
        """Removes what the reader has not."""
        for stage in ("go", "done"):
            self._store.delete_key(f"{call.reply}/{stage}")

    def connect(self, call: Call) -> Link:
        """A new communicator for the call's pair and epoch."""
        store = PrefixStore(f"{call.pair}/{call.epoch}", self._client())
        return Link(self.transport, store, SOURCE_RANK, self.place.host, self.place.timeout_s)

    def drop(self, sender: _PairSender, *, if_idle: bool = False) -> bool:
        """Forgets a sender; with `if_idle` only when no call waits for it."""
        with self._lock:
            if if_idle and sender.has_calls:
                return False
            if self._senders.get(sender.pair) is sender:
                del self._senders[sender.pair]
            return True

    def _client(self) -> TCPStore:
        """A connection of its own: one that waits holds up whoever shares it."""
        return TCPStore(
            self.place.host,
            self._store.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.place.timeout_s),
        )

    def _take_calls(self) -> None:
        store = self._client()
        store.set_timeout(_UNTIL_A_CALL_COMES)
        while True:
            try:
                message = store.queue_pop(CALLS)
            except RuntimeError:
                _log.exception("the handover's rendezvous store is gone: no more calls are taken")
                return
            if message == self._stop_word:
                return
            try:
                call = Call.peek(message)
                is_sealed = Call.is_sealed(message, self._secrets.secret_of(call.pair))
            except ValueError:
                is_sealed = False
            if is_sealed:
                self._dispatch(call)
            else:
                _log.warning("a call for KV blocks that no known pair has sealed was ignored")

    def _dispatch(self, call: Call) -> None:
        with self._lock:
            sender = self._senders.get(call.pair)
            if sender is None:
                sender = self._senders[call.pair] = _PairSender(call.pair, self)
                sender.start()
            if not sender.offer(call):
                _log.warning("a pair has %d calls for KV blocks waiting: one more was dropped", _MAX_CALLS_WAITING)


class _PairSender(threading.Thread):
    """Serves one pair's calls in order, over one communicator at a time."""

    def __init__(self, pair: str, source: DistSource) -> None:
        super().__init__(name="handover-sender", daemon=True)
        self.pair = pair
        self._source = source
        self._calls: queue.Queue[Call | None] = queue.Queue(_MAX_CALLS_WAITING)
        self._link: Link | None = None
        self._epoch = ""

    @property
    def has_calls(self) -> bool:
        """Whether a call waits."""
        return not self._calls.empty()

    def offer(self, call: Call) -> bool:
        """Puts a call behind the others; False when there are too many."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def end(self) -> None:
        """Has the thread end after the call that it serves."""
        while True:
            try:
                self._calls.put_nowait(None)
                return
            except queue.Full:
                self._calls.get_nowait()

    def run(self) -> None:
        """The thread's life."""
        try:
            while (call := self._next()) is not None:
                try:
                    self._serve(call)
                except TransferFailedError as error:
                    _log.warning("a handover over %s failed: %s", self._source.transport.value, error)
                    self._source.forget_replies(call)  # its reader may be gone
                    self._disconnect()
        except Exception:
            _log.exception("the sender of a pair ended")
        finally:
            self._disconnect()
            self._source.drop(self)

    def _next(self) -> Call | None:
        """The next call; None when this pair has none for long, or none any more."""
        while True:
            try:
                call = self._calls.get(timeout=SOURCE_IDLE_S)
            except queue.Empty:
                if self._source.drop(self, if_idle=True):
                    return None
            else:
                return None if call is None or not call.lease_id else call

    def _serve(self, call: Call) -> None:
        lease = self._source.lease_of(call)
        if lease is None or not _lie_within(call, len(lease.block_ids)):
            self._source.reply(call, "go", stale=True)
            return
        self._source.reply(call, "go", stale=False)
        if self._link is None or self._epoch != call.epoch:
            self._disconnect()
            self._link, self._epoch = self._source.connect(call), call.epoch
        checksums = self._send(self._link, lease, call)
        self._source.reply(call, "done", stale=checksums is None, checksums=checksums)
        if checksums is None:
            # The reader may be waiting for what may not be sent any more.
            self._disconnect()

    def _send(self, link: Link, lease: Lease, call: Call) -> list[int | None] | None:
        """Sends the pieces; returns their checksums, or None when the lease ended before it was done."""
        under_way: deque[Any] = deque()
        checksums: list[int | None] = []
        for first, count in call.pieces:
            if not self._source.is_live(lease):
                return None
            start = lease.block_ids[first]
            piece = self._source.blocks[start : start + count].view(-1)
            under_way.append(link.start_send(piece))
            checksums.append(checksum(piece))
            if len(under_way) == _MAX_MESSAGES_UNDER_WAY:
                link.finish(under_way.popleft())
        while under_way:
            link.finish(under_way.popleft())
        return checksums if self._source.is_live(lease) else None

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.abort()
            self._link = None


def _lie_within(call: Call, num_blocks: int) -> bool:
    return all(first >= 0 and count > 0 and first + count <= num_blocks for first, count in call.pieces)


def _listen(place: DistPlace) -> TCPStore:
    """A store that listens on a free port of `place.host` alone: by itself it would listen everywhere."""
    family, kind, proto, _, address = socket.getaddrinfo(place.host, 0, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, proto)
    listening.bind(address)
    listening.listen()
    return TCPStore(
        place.host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=place.timeout_s),
        master_listen_fd=listening.detach(),
    )
