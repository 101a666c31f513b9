"""Makes a reader of any handle, in the decode engine process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer.cuda_ipc import CudaIpcReader
from kv_transfer.descriptor import CudaIpcHandle, DistHandle, GrpcHandle, ShmHandle
from kv_transfer.dist_reader import DistReader
from kv_transfer.grpc_reader import GrpcReader
from kv_transfer.shm import ShmReader

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from baton.core.errors import ServingError
    from kv_transfer.descriptor import PeerPool, PoolHandle
    from kv_transfer.destination import Move
    from kv_transfer.transport import KVReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderFactory:
    """`open_reader` for `PeerReaders`.

    `channel` makes a channel to an address, which its reader then owns; `from_call` turns a failed call into its
    ServingError; a transfer without progress for `timeout_s` has failed; `move` copies from mapped memory.
    """

    channel: Callable[[str], grpc.Channel]
    from_call: Callable[[Any], ServingError]
    max_message_bytes: int
    timeout_s: float
    move: Move

    def __call__(self, pool: PeerPool, handle: PoolHandle) -> KVReader:
        """A reader of the pool by the way that the handle names; raises what the transport raises."""
        match handle:
            case ShmHandle():
                return ShmReader.open(pool, handle, self.move)
            case CudaIpcHandle():
                return CudaIpcReader.open(pool, handle)
            case DistHandle():
                return DistReader(pool, handle, timeout_s=self.timeout_s)
            case GrpcHandle():
                return GrpcReader(
                    pool,
                    self.channel(pool.address),
                    self.from_call,
                    max_message_bytes=self.max_message_bytes,
                    timeout_s=self.timeout_s,
                )
