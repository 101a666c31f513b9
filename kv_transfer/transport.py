"""The seam between the handover protocol and the ways of moving bytes.

The decode engine process holds one `KVReader` for each source pool that it knows. A new transport is a handle type
(`kv_transfer.descriptor.PoolHandle`) and a reader that passes the contract suite (tests/unit/kv_transfer).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """A finished read: which transport carried how many bytes, in how many seconds."""

    transport: str
    num_bytes: int
    copy_s: float


class KVReader(Protocol):
    """Reads one source's pool."""

    def read(self, descriptor: KVDescriptor, into: KVPool, block_ids: Sequence[int]) -> ReadResult:
        """Copies the descriptor's blocks, in order, to `block_ids` of `into`. Blocks; call it from a helper thread.

        When it returns, the copy is whole and was made while the lease lived. When it raises, the destination
        blocks hold garbage. Either way nothing is written to them any more: until then they must stay with the
        caller, even when the request is aborted meanwhile.

        Raises StaleLeaseError when the lease ended before the copy did, PeerGoneError when the reader was closed
        meanwhile, PoolMismatchError for a descriptor of another life of the source, NoTransportError when the
        transport can't fill this kind of memory, TransferFailedError (ChecksumError) when the transport broke, stalled
        or did damage, and InvalidArgumentError for blocks that do not exist or are too few or too many.
        """
        ...

    def close(self) -> None:
        """Gives up all that is held of the source: mappings, handles, connections. Repeating it is harmless.

        A running read raises PeerGoneError at its next piece, or ends by its time-out; at most a piece is waited for.
        """
        ...
