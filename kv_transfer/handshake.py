"""What two workers compare before one reads the other's pool."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from baton.core.errors import FailedPreconditionError

if TYPE_CHECKING:
    from baton.core.model import KVLayout, ModelFingerprint
    from kv_transfer.descriptor import PeerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One side of a handshake: which life of which worker, on which host, and what it runs."""

    peer: PeerKey
    host_id: str
    fingerprint: ModelFingerprint
    layout: KVLayout

    def require_compatible(self, other: Endpoint) -> None:
        """Raises FailedPreconditionError with both sides' values when blocks of one mean nothing to the other."""
        ours, theirs = self.peer.worker_id, other.peer.worker_id
        self.fingerprint.require_equal(other.fingerprint, ours=ours, theirs=theirs)
        for field in fields(self.layout):
            mine, his = getattr(self.layout, field.name), getattr(other.layout, field.name)
            if mine != his:
                raise FailedPreconditionError(
                    f"KV {field.name} differs: {ours} has {mine}, {theirs} has {his}",
                    reason="LAYOUT_MISMATCH",
                    metadata={"field": field.name, "ours": str(mine), "theirs": str(his)},
                )
