"""The source's side of the protocol: served by each prefill worker's server process to the decode workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kv_transfer import wire
from kv_transfer.errors import LeaseNotFoundError

if TYPE_CHECKING:
    import grpc.aio

    from kv_transfer.descriptor import PoolHandle
    from kv_transfer.handshake import Endpoint
    from kv_transfer.lease import LeaseOutcome


class LeaseHolder(Protocol):
    """Whoever owns the lease table: the prefill worker, whose engine process has it."""

    async def renew_lease(self, lease_id: str) -> float:
        """Makes a lease last from now; returns for how many seconds. LeaseNotFoundError when it has ended."""
        ...

    async def release_lease(self, lease_id: str, outcome: LeaseOutcome) -> None:
        """Ends a lease. Nothing to do when it has ended before."""
        ...


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Compares, hands out the pool, and passes renewals and releases on. Keeps no state of its own.

    `handle` names the pool of this life of the worker, so calls that name another life are answered here: its
    leases ended with it.
    """

    def __init__(self, endpoint: Endpoint, handle: PoolHandle, leases: LeaseHolder) -> None:
        self._endpoint = endpoint
        self._handle = handle
        self._leases = leases

    async def Handshake(
        self, request: kv_transfer_pb2.HandshakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_transfer_pb2.HandshakeResponse:
        """Refuses a reader that does not fit; offers shared memory to a reader on the same host."""
        theirs = wire.endpoint_from_proto(request)
        self._endpoint.require_compatible(theirs)
        response = wire.endpoint_to_response(self._endpoint)
        if theirs.host_id == self._endpoint.host_id:
            response.shm.segment = self._handle.segment
            response.shm.num_blocks = self._handle.num_blocks
        return response

    async def RenewLease(
        self, request: kv_transfer_pb2.RenewLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_transfer_pb2.RenewLeaseResponse:
        """NOT_FOUND when the lease has ended or is of another life."""
        wire.require_set("lease_id", request.lease_id)
        wire.require_set("incarnation", request.incarnation)
        if request.incarnation != self._endpoint.peer.incarnation:
            raise LeaseNotFoundError(f"lease {request.lease_id} ended with another life of {self._endpoint.peer}")
        return kv_transfer_pb2.RenewLeaseResponse(lease_s=await self._leases.renew_lease(request.lease_id))

    async def ReleaseLease(
        self, request: kv_transfer_pb2.ReleaseLeaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_transfer_pb2.ReleaseLeaseResponse:
        """OK whether or not the lease still lived."""
        wire.require_set("lease_id", request.lease_id)
        wire.require_set("incarnation", request.incarnation)
        if request.incarnation == self._endpoint.peer.incarnation:
            await self._leases.release_lease(request.lease_id, wire.outcome_from_reader(request.outcome))
        return kv_transfer_pb2.ReleaseLeaseResponse()
