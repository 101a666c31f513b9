"""What two workers compare before one reads the other's pool."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from baton.core.errors import FailedPreconditionError

if TYPE_CHECKING:
    from baton.core.model import KVLayout, ModelFingerprint
    from kv_transfer.descriptor import PeerKey, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One side of a handshake: which life of which worker, on which host, and what it runs.

    `transports` and `converts_dtype` are a reader's: what it can read by, most wanted first, and whether it takes
    what was computed with other numerics, that is another element type or otherwise quantized weights.
    """

    peer: PeerKey
    host_id: str
    fingerprint: ModelFingerprint
    layout: KVLayout
    transports: tuple[Transport, ...] = ()
    converts_dtype: bool = False

    def require_compatible(self, reader: Endpoint) -> None:
        """Raises FailedPreconditionError with both sides' values when `reader` can't make use of our blocks.

        Block sizes may differ, and so may the numerics when the reader converts them.
        """
        ours, theirs = self.peer.worker_id, reader.peer.worker_id
        fingerprint = reader.fingerprint
        if reader.converts_dtype:
            fingerprint = replace(fingerprint, dtype="", quantization="")
        self.fingerprint.require_equal(fingerprint, ours=ours, theirs=theirs)
        may_differ = {"block_size", "dtype"} if reader.converts_dtype else {"block_size"}
        for field in fields(self.layout):
            mine, his = getattr(self.layout, field.name), getattr(reader.layout, field.name)
            if mine != his and field.name not in may_differ:
                raise FailedPreconditionError(
                    f"KV {field.name} differs: {ours} has {mine}, {theirs} has {his}",
                    reason="LAYOUT_MISMATCH",
                    metadata={"field": field.name, "ours": str(mine), "theirs": str(his)},
                )
