"""What the two sides of a handover tell each other, as plain data.

Everything here is frozen and picklable: it crosses the wire (`kv_transfer.wire`) and the pipe between a
worker's server and engine processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.model import KVLayout


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One life of one worker. A worker that restarted is another peer, whatever its name and address."""

    worker_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.incarnation}"


class Transport(Enum):
    """A way of moving blocks. The value is its name in settings, messages to people and metrics."""

    CUDA_IPC = "cuda_ipc"
    SHM = "shm"
    NCCL = "nccl"
    GLOO = "gloo"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmHandle:
    """A pool in shared memory of this host: a segment's name under /dev/shm, and its size in blocks."""

    segment: str
    num_blocks: int

    @property
    def transport(self) -> Transport:
        """Which way this is."""
        return Transport.SHM


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaIpcHandle:
    """A pool in a device's memory on this host; its fence table is in a segment of shared memory without blocks.

    The fields from `memory_handle` on are what torch's own sharing of CUDA tensors between processes passes around.
    """

    device_uuid: str
    num_blocks: int
    fence_segment: str
    num_bytes: int
    memory_handle: bytes = field(repr=False)
    offset_bytes: int
    ref_counter_handle: bytes = field(repr=False)
    ref_counter_offset: int
    event_handle: bytes = field(repr=False)
    needs_event_sync: bool

    @property
    def transport(self) -> Transport:
        """Which way this is."""
        return Transport.CUDA_IPC


@dataclass(frozen=True, slots=True, kw_only=True)
class DistHandle:
    """A source that sends over torch.distributed: where its rendezvous store listens, and the backend."""

    host: str
    port: int
    transport: Transport


@dataclass(frozen=True, slots=True)
class GrpcHandle:
    """A source that streams its blocks from the address of the handshake."""

    @property
    def transport(self) -> Transport:
        """Which way this is."""
        return Transport.GRPC


PoolHandle = ShmHandle | CudaIpcHandle | DistHandle | GrpcHandle
"""How to reach a source's pool. Each transport adds its own handle type to this union."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPool:
    """A source's pool, as a handshake made it known: whose it is, how its blocks lie, and the ways to it.

    `handles` are in the order in which they are to be tried. `secret` proves to the source who asks.
    """

    peer: PeerKey
    layout: KVLayout
    address: str
    secret: bytes = field(repr=False)
    handles: tuple[PoolHandle, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDescriptor:
    """A KV cache in a source's pool, readable while its lease lasts.

    `block_ids[i]` holds positions [i * block size, (i + 1) * block size); the cache holds positions
    [0, num_tokens). `lease_s` counts from the moment the descriptor was sent: a duration, because two
    processes' clocks cannot be compared.

    One that `is_growing` names no blocks: its parts do, as `Growth` tells of them. A part is a descriptor of the
    positions from the lease's block number `first_block` on.
    """

    lease_id: str
    lease_slot: int
    generation: int
    worker_id: str
    incarnation: str
    address: str
    block_ids: tuple[int, ...]
    num_tokens: int
    lease_s: float
    is_growing: bool = False
    first_block: int = 0

    def part(self, first_block: int, block_ids: Sequence[int], num_tokens: int) -> KVDescriptor:
        """Of a growing cache the positions in these blocks of it, which are computed."""
        return replace(
            self, is_growing=False, first_block=first_block, block_ids=tuple(block_ids), num_tokens=num_tokens
        )

    @property
    def peer(self) -> PeerKey:
        """The life of the worker that holds the blocks."""
        return PeerKey(self.worker_id, self.incarnation)

    def require_fits(self, layout: KVLayout) -> None:
        """Raises InvalidArgumentError unless the blocks are as many as `num_tokens` positions need."""
        expected = 0 if self.is_growing else layout.blocks_for(self.num_tokens)
        if len(self.block_ids) != expected:
            raise InvalidArgumentError(
                "kv.block_ids",
                f"{len(self.block_ids)} blocks for {self.num_tokens} tokens, must be {expected} "
                f"of {layout.block_size} tokens",
            )


@dataclass(frozen=True, slots=True)
class Growth:
    """More of a growing cache may be read: its next blocks. With the last ones come the first tokens, one a choice."""

    block_ids: tuple[int, ...]
    first_token_ids: tuple[int, ...] = ()
