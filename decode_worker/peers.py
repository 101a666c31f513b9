"""Passes what the server process learns of its peers on to the engine, which maps their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode_worker.messages import ForgetPeer, OpenPeer

if TYPE_CHECKING:
    from collections.abc import Callable

    from decode_worker.messages import DecodeCommand
    from kv_transfer.descriptor import PeerKey, PeerPool


class EnginePeers:
    """A `PeerListener`. Commands keep their order, so a peer is open before the first sequence that reads from it."""

    def __init__(self, send: Callable[[DecodeCommand], None]) -> None:
        self._send = send

    def peer_opened(self, pool: PeerPool) -> None:
        """Has the engine map the pool."""
        self._send(OpenPeer(pool=pool))

    def peer_closed(self, peer: PeerKey) -> None:
        """Has the engine unmap the pool."""
        self._send(ForgetPeer(peer=peer))
