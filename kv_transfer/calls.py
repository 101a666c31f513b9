"""The reader's calls to a source, with their time limits and retries."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from baton.core.errors import DeadlineExceededError, NotFoundError, ServingError, UnavailableError
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from kv_transfer import wire
from kv_transfer.errors import PeerGoneError, StaleLeaseError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from kv_transfer.descriptor import Growth, KVDescriptor, PeerPool
    from kv_transfer.handshake import Endpoint
    from kv_transfer.lease import LeaseOutcome

Result = TypeVar("Result")

ATTEMPT_S = 1.0
"""Time limit of one attempt. A source's server process answers in milliseconds, whatever its engine does."""

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5


class SourceCalls:
    """Calls as `reader`. Every call may be repeated by the source's promise, so all are, until `budget_s` is spent.

    `channel` gives the channel to an address and keeps it; `from_call` turns a failed call into its ServingError. A
    source that doesn't answer within the budget is a PeerGoneError.
    """

    def __init__(
        self,
        reader: Endpoint,
        channel: Callable[[str], grpc.aio.Channel],
        from_call: Callable[[grpc.aio.AioRpcError], ServingError],
    ) -> None:
        self.reader = reader
        self._channel = channel
        self._from_call = from_call

    async def handshake(self, address: str, budget_s: float) -> PeerPool:
        """Who lives at `address` and how to reach its pool.

        FailedPreconditionError when the two do not fit.
        """
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(address))
        request = wire.endpoint_to_request(self.reader)
        answer = await self._persist(lambda: stub.Handshake(request, timeout=ATTEMPT_S), address, budget_s)
        return wire.pool_from_proto(answer, address)

    async def renew(self, descriptor: KVDescriptor, secret: bytes, budget_s: float) -> float:
        """Makes the lease last from now; returns for how many seconds. StaleLeaseError when it has ended."""
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(descriptor.address))
        request = kv_transfer_pb2.RenewLeaseRequest(
            lease_id=descriptor.lease_id, incarnation=descriptor.incarnation, pair_secret=secret
        )
        try:
            answer = await self._persist(
                lambda: stub.RenewLease(request, timeout=ATTEMPT_S), descriptor.address, budget_s
            )
        except NotFoundError as error:
            raise StaleLeaseError(f"lease {descriptor.lease_id} ended while the request waited") from error
        return answer.lease_s

    async def follow(self, descriptor: KVDescriptor, secret: bytes) -> AsyncIterator[Growth]:
        """What may be read of a growing cache, as it grows.

        Not repeated, and without a time limit, for a prompt takes its time: whoever renews the lease meanwhile finds
        out when the source is gone. StaleLeaseError when the lease ended, PeerGoneError when the source is gone.
        """
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(descriptor.address))
        request = kv_transfer_pb2.FollowLeaseRequest(
            lease_id=descriptor.lease_id, incarnation=descriptor.incarnation, pair_secret=secret
        )
        try:
            async for progress in stub.FollowLease(request):
                yield wire.growth_from_proto(progress)
        except grpc.aio.AioRpcError as failure:
            error = self._from_call(failure)
            if isinstance(error, NotFoundError):
                raise StaleLeaseError(f"lease {descriptor.lease_id} ended before its cache was complete") from failure
            if isinstance(error, UnavailableError):
                raise PeerGoneError(f"the worker at {descriptor.address} went away") from failure
            raise error from failure

    async def release(self, descriptor: KVDescriptor, secret: bytes, outcome: LeaseOutcome, budget_s: float) -> None:
        """Ends the lease, whether or not it still lives."""
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(descriptor.address))
        request = kv_transfer_pb2.ReleaseLeaseRequest(
            lease_id=descriptor.lease_id,
            incarnation=descriptor.incarnation,
            pair_secret=secret,
            outcome=wire.outcome_to_proto(outcome),
        )
        await self._persist(lambda: stub.ReleaseLease(request, timeout=ATTEMPT_S), descriptor.address, budget_s)

    async def _persist(self, attempt: Callable[[], Awaitable[Result]], address: str, budget_s: float) -> Result:
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + budget_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await attempt()
            except grpc.aio.AioRpcError as failure:
                error = self._from_call(failure)
                if not isinstance(error, UnavailableError | DeadlineExceededError):
                    raise error from failure
                if loop.time() + pause_s >= give_up_at_s:
                    raise PeerGoneError(f"the worker at {address} does not answer") from failure
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
