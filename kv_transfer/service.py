"""The source's side of the protocol: served by each prefill worker's server process to the decode workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from baton.core.errors import UnavailableError
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kv_transfer import choice, wire
from kv_transfer.errors import LeaseNotFoundError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc.aio

    from kv_transfer.block_stream import BlockStream, LeasedBlocks
    from kv_transfer.descriptor import Growth, PoolHandle
    from kv_transfer.handshake import Endpoint
    from kv_transfer.lease import LeaseOutcome
    from kv_transfer.pairs import PairSecrets

    Context = grpc.aio.ServicerContext[Any, Any]


class LeaseHolder(Protocol):
    """Whoever owns the lease table: the prefill worker, whose engine process has it.

    The first pair that names a lease has it; for every other pair the lease does not exist.
    """

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        """Makes a lease last from now; returns for how many seconds. LeaseNotFoundError when it has ended."""
        ...

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        """Ends a lease. Nothing to do when it has ended before."""
        ...

    def follow_lease(self, lease_id: str, pair: str) -> AsyncIterator[Growth]:
        """What may be read of a growing cache, as it grows. LeaseNotFoundError when the lease ends before its end."""
        ...

    def leased_blocks(self, lease_id: str, pair: str) -> LeasedBlocks:
        """What the lease lets its pair read. LeaseNotFoundError when it has ended."""
        ...


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Compares, hands out the pool, passes renewals and releases on, and streams blocks.

    `handles` name the pool of this life of the worker, so calls that name another life are answered here: its
    leases ended with it. `stream` serves PullBlocks; None where the blocks are out of this process's reach, and then
    no handle offers it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        handles: Sequence[PoolHandle],
        secrets: PairSecrets,
        leases: LeaseHolder,
        stream: BlockStream | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._handles = handles
        self._secrets = secrets
        self._leases = leases
        self._stream = stream

    async def Handshake(
        self, request: kv_transfer_pb2.HandshakeRequest, context: Context
    ) -> kv_transfer_pb2.HandshakeResponse:
        """Refuses a reader that does not fit; gives the others a secret and the ways that both sides have."""
        reader = wire.endpoint_from_proto(request)
        self._endpoint.require_compatible(reader)
        handles = choice.common_handles(
            self._handles, reader.transports, same_host=reader.host_id == self._endpoint.host_id
        )
        return wire.endpoint_to_response(self._endpoint, handles, self._secrets.mint())

    async def RenewLease(
        self, request: kv_transfer_pb2.RenewLeaseRequest, context: Context
    ) -> kv_transfer_pb2.RenewLeaseResponse:
        """NOT_FOUND when the lease has ended, is of another life or of another pair."""
        pair = self._require_pair(request)
        return kv_transfer_pb2.RenewLeaseResponse(lease_s=await self._leases.renew_lease(request.lease_id, pair))

    async def FollowLease(
        self, request: kv_transfer_pb2.FollowLeaseRequest, context: Context
    ) -> AsyncIterator[kv_transfer_pb2.FollowLeaseResponse]:
        """Streams what is computed of a growing cache."""
        async for growth in self._leases.follow_lease(request.lease_id, self._require_pair(request)):
            yield wire.growth_to_proto(growth)

    async def ReleaseLease(
        self, request: kv_transfer_pb2.ReleaseLeaseRequest, context: Context
    ) -> kv_transfer_pb2.ReleaseLeaseResponse:
        """OK whether or not the lease still lived."""
        outcome = wire.outcome_from_reader(request.outcome)
        try:
            pair = self._require_pair(request)
        except LeaseNotFoundError:
            return kv_transfer_pb2.ReleaseLeaseResponse()
        await self._leases.release_lease(request.lease_id, pair, outcome)
        return kv_transfer_pb2.ReleaseLeaseResponse()

    async def PullBlocks(
        self, request: kv_transfer_pb2.PullBlocksRequest, context: Context
    ) -> AsyncIterator[kv_transfer_pb2.PullBlocksResponse]:
        """Streams a part of the lease's blocks."""
        lease = self._leases.leased_blocks(request.lease_id, self._require_pair(request))
        if self._stream is None:
            raise UnavailableError("this worker's blocks cannot be streamed", reason="NO_TRANSPORT")
        part = wire.part_from_proto(request)
        async for piece in self._stream.pieces(lease, part):
            yield kv_transfer_pb2.PullBlocksResponse(data=piece.data, crc32=piece.crc32)

    def _require_pair(
        self,
        request: kv_transfer_pb2.RenewLeaseRequest
        | kv_transfer_pb2.FollowLeaseRequest
        | kv_transfer_pb2.ReleaseLeaseRequest
        | kv_transfer_pb2.PullBlocksRequest,
    ) -> str:
        """Who asks. LeaseNotFoundError for a lease of another life, whose secrets nobody can check any more."""
        wire.require_set("lease_id", request.lease_id)
        wire.require_set("incarnation", request.incarnation)
        if request.incarnation != self._endpoint.peer.incarnation:
            raise LeaseNotFoundError(f"lease {request.lease_id} ended with another life of {self._endpoint.peer}")
        return self._secrets.require(request.pair_secret)
