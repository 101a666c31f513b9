"""Servicer and directory over real gRPC, with the error mapping that runs in production."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.core.errors import FailedPreconditionError, InvalidArgumentError
from baton.core.model import KVLayout, ModelFingerprint
from baton.rpc.errors import from_call
from baton.rpc.interceptors import ErrorInterceptor
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc
from kv_transfer import choice, client, wire
from kv_transfer.calls import SourceCalls
from kv_transfer.client import PeerDirectory, PeerTimings
from kv_transfer.descriptor import Growth, KVDescriptor, PeerKey, PeerPool, ShmHandle, Transport
from kv_transfer.errors import LeaseNotFoundError, NoTransportError, PeerGoneError, StaleLeaseError
from kv_transfer.handshake import Endpoint
from kv_transfer.lease import LeaseOutcome
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.service import KvTransferServicer
from prefill_worker.messages import HeldCache

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
FINGERPRINT = ModelFingerprint(model="m", weights="a1" * 16, tokenizer="b1" * 16, dtype="bfloat16")
HANDLE = ShmHandle(segment="baton-" + "a" * 32, num_blocks=64)
PREFILL = Endpoint(peer=PeerKey("prefill-1", "life-1"), host_id="host", fingerprint=FINGERPRINT, layout=LAYOUT)
DECODE = replace(
    PREFILL, peer=PeerKey("decode-1", "life-9"), transports=choice.usable([Transport.SHM, Transport.GRPC], "cpu")
)
SECRETS = PairSecrets(new_key())
HELD = HeldCache(lease_id="lease", slot=0, generation=1, block_ids=(5, 6))
# Patient with everybody, for a busy machine keeps the source, which is this process too, from answering for a while.
TIMINGS = PeerTimings(silence_s=10.0, probe_interval_s=0.05)
LEASE_S, RENEWALS_PER_LEASE = 20.0, 200
WITHIN_S = 60.0


@dataclass
class Leases:
    """A lease holder that knows `live` and writes down what it is told."""

    live: set[str] = field(default_factory=lambda: {"lease"})
    lease_s: float = LEASE_S
    pairs: set[str] = field(default_factory=set)
    renewals: int = 0
    releases: asyncio.Queue = field(default_factory=asyncio.Queue)
    renewed: asyncio.Event = field(default_factory=asyncio.Event)
    growth: asyncio.Queue = field(default_factory=asyncio.Queue)

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        self.leased_blocks(lease_id, pair)
        self.renewals += 1
        if self.renewals == 3:
            self.renewed.set()
        return self.lease_s

    async def follow_lease(self, lease_id: str, pair: str) -> AsyncIterator[Growth]:
        self.leased_blocks(lease_id, pair)
        while True:
            growth = await self.growth.get()
            if growth is None:
                raise LeaseNotFoundError(f"lease {lease_id} has ended")
            yield growth
            if growth.first_token_ids:
                return

    def leased_blocks(self, lease_id: str, pair: str) -> HeldCache:
        if lease_id not in self.live:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        self.pairs.add(pair)
        return HELD

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        self.pairs.add(pair)
        self.live.discard(lease_id)
        self.releases.put_nowait((lease_id, outcome))


@dataclass
class Listener:
    opened: list[PeerPool] = field(default_factory=list)
    closed: list[PeerKey] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def peer_opened(self, pool: PeerPool) -> None:
        self.opened.append(pool)

    def peer_closed(self, peer: PeerKey) -> None:
        self.closed.append(peer)
        self.changed.set()


@asynccontextmanager
async def serving(
    endpoint: Endpoint, leases: Leases, port: int = 0, *, kind: type[KvTransferServicer] = KvTransferServicer
):
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=[("grpc.so_reuseport", 0)])
    servicer = kind(endpoint, [HANDLE], SECRETS, leases)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> Leases:
    """Of long life, and renewed every tenth of a second."""
    monkeypatch.setattr(client, "_RENEWALS_PER_LEASE", RENEWALS_PER_LEASE)
    return Leases()


@pytest.fixture
async def source(leases):
    async with serving(PREFILL, leases) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
async def channels():
    options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100)]
    opened = {}

    def channel(address):
        if address not in opened:
            opened[address] = grpc.aio.insecure_channel(address, options=options)
        return opened[address]

    yield channel
    for one in opened.values():
        await one.close()


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
async def directory(channels, listener):
    async with PeerDirectory.serve(SourceCalls(DECODE, channels, from_call), listener, TIMINGS) as directory:
        yield directory


def descriptor_at(address: str, **changes) -> KVDescriptor:
    descriptor = KVDescriptor(
        lease_id="lease",
        lease_slot=2,
        generation=2**40,
        worker_id="prefill-1",
        incarnation="life-1",
        address=address,
        block_ids=(5, 6),
        num_tokens=17,
        lease_s=LEASE_S,
    )
    return replace(descriptor, **changes)


async def test_a_held_lease_is_connected_renewed_and_released_as_consumed(source, directory, listener, leases):
    async with directory.hold(descriptor_at(source)) as lease:
        (pool,) = listener.opened
        assert (pool.peer, pool.layout, pool.address, pool.handles) == (PREFILL.peer, LAYOUT, source, (HANDLE,))
        assert repr(pool.secret) not in repr(pool), "it would end up in a log"
        await leases.renewed.wait()
        lease.consumed()
        assert await leases.releases.get() == ("lease", LeaseOutcome.CONSUMED)
        assert leases.pairs == {SECRETS.require(pool.secret)}
        # Its renewals have ended and none is missed.
        await asyncio.sleep(3 * LEASE_S / RENEWALS_PER_LEASE)
    assert leases.releases.empty()


async def test_leaving_without_a_word_abandons(source, directory, leases):
    async with directory.hold(descriptor_at(source)):
        pass
    assert await leases.releases.get() == ("lease", LeaseOutcome.ABANDONED)


async def test_a_failure_and_a_cancellation_inside_come_out_as_they_are_and_abandon(source, directory, leases):
    with pytest.raises(ValueError, match="mine"):
        async with directory.hold(descriptor_at(source)):
            raise ValueError("mine")
    assert await leases.releases.get() == ("lease", LeaseOutcome.ABANDONED)

    leases.live.add("lease")
    entered = asyncio.Event()

    async def hold() -> None:
        async with directory.hold(descriptor_at(source)):
            entered.set()
            await asyncio.Event().wait()

    holding = asyncio.ensure_future(hold())
    await entered.wait()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert await leases.releases.get() == ("lease", LeaseOutcome.ABANDONED)


async def test_a_lease_that_ended_at_the_source_cancels_its_holder(source, directory, leases):
    leases.live.clear()
    with pytest.raises(StaleLeaseError):
        async with directory.hold(descriptor_at(source)):
            await asyncio.Event().wait()


async def test_many_requests_shake_hands_once(source, directory, listener):
    async def hold(number: int) -> None:
        async with directory.hold(descriptor_at(source, lease_id=f"lease-{number}", lease_s=5.0)):
            pass

    await asyncio.gather(*(hold(number) for number in range(20)))
    assert len(listener.opened) == 1


@pytest.mark.parametrize(
    ("changes", "what", "values"),
    [
        ({"fingerprint": replace(FINGERPRINT, weights="a2" * 16)}, "weights", ("a1" * 16, "a2" * 16)),
        ({"fingerprint": replace(FINGERPRINT, tokenizer="b2" * 16)}, "tokenizer", ("b1" * 16, "b2" * 16)),
        ({"fingerprint": replace(FINGERPRINT, quantization="int8")}, "quantization", ("none", "int8")),
        ({"layout": replace(LAYOUT, num_layers=3)}, "num_layers", ("2", "3")),
        ({"layout": replace(LAYOUT, dtype="float32")}, "dtype", ("bfloat16", "float32")),
    ],
)
async def test_workers_that_do_not_fit_are_told_both_values_and_get_no_secret(
    source, channels, listener, leases, changes, what, values
):
    calls = SourceCalls(replace(DECODE, **changes), channels, from_call)
    async with PeerDirectory.serve(calls, listener, TIMINGS) as directory:
        with pytest.raises(FailedPreconditionError, match=what) as refusal:
            async with directory.hold(descriptor_at(source)):
                pytest.fail("entered")
    assert (refusal.value.metadata["ours"], refusal.value.metadata["theirs"]) == values
    assert leases.releases.empty(), "the lease ends by expiry, or by whoever sent the descriptor"
    assert listener.opened == []


async def test_a_reader_that_converts_may_have_another_block_size_and_other_numerics(
    source, channels, listener, leases
):
    mine = replace(
        DECODE,
        layout=replace(LAYOUT, block_size=32, dtype="float32"),
        fingerprint=replace(FINGERPRINT, dtype="float32", quantization="int8"),
        converts_dtype=True,
    )
    async with PeerDirectory.serve(SourceCalls(mine, channels, from_call), listener, TIMINGS) as directory:
        async with directory.hold(descriptor_at(source)):
            assert listener.opened[0].layout == LAYOUT, "how the source's blocks lie"
        with pytest.raises(InvalidArgumentError, match="must be 2 of 16 tokens"):
            async with directory.hold(descriptor_at(source, block_ids=(5,))):
                pytest.fail("entered")


@pytest.mark.parametrize("secret", [b"", b"x" * 48, bytes(16)])
async def test_a_lease_is_worthless_without_the_secret_of_a_pair(source, channels, leases, secret):
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels(source))
    names = {"lease_id": "lease", "incarnation": "life-1", "pair_secret": secret}
    pull = stub.PullBlocks(pb.PullBlocksRequest(**names, num_bytes=1, max_piece_bytes=1))
    for call in (
        stub.RenewLease(pb.RenewLeaseRequest(**names)),
        stub.ReleaseLease(pb.ReleaseLeaseRequest(**names)),
        pull.read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert secret.hex() not in failure.value.details() or not secret
    assert leases.releases.empty()
    assert leases.renewals == 0


async def test_a_secret_of_another_life_is_none(source, channels, leases):
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels(source))
    foreign = PairSecrets(new_key()).mint()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.RenewLease(pb.RenewLeaseRequest(lease_id="lease", incarnation="life-1", pair_secret=foreign))
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_another_host_is_offered_no_shared_memory(source, channels, listener, leases):
    calls = SourceCalls(replace(DECODE, host_id="elsewhere"), channels, from_call)
    async with PeerDirectory.serve(calls, listener, replace(TIMINGS, flush_s=WITHIN_S)) as directory:
        with pytest.raises(NoTransportError):
            async with directory.hold(descriptor_at(source)):
                pytest.fail("entered")
    assert leases.releases.get_nowait() == ("lease", LeaseOutcome.ABANDONED)


async def test_a_source_that_died_is_forgotten_within_seconds(leases, channels, listener):
    timings = replace(TIMINGS, silence_s=0.3)
    async with PeerDirectory.serve(SourceCalls(DECODE, channels, from_call), listener, timings) as directory:
        async with serving(PREFILL, leases) as port, directory.hold(descriptor_at(f"127.0.0.1:{port}")) as lease:
            lease.consumed()
            assert len(listener.opened) == 1
        await asyncio.wait_for(listener.changed.wait(), WITHIN_S)
        assert listener.closed == [PREFILL.peer]
        assert directory.peers == frozenset()


async def test_a_holder_whose_source_dies_is_cancelled(leases, directory):
    holding = asyncio.Event()

    async def hold(address: str) -> None:
        async with directory.hold(descriptor_at(address, lease_s=0.15)):
            holding.set()
            await asyncio.Event().wait()

    async with serving(PREFILL, leases) as port:
        task = asyncio.ensure_future(hold(f"127.0.0.1:{port}"))
        await holding.wait()
    with pytest.raises(PeerGoneError):
        await asyncio.wait_for(task, WITHIN_S)


class StoppingServicer(KvTransferServicer):
    """Ends its first renewal as gRPC does when a server stops: without a word of ours."""

    has_cancelled = False

    async def RenewLease(self, request, context):
        if not self.has_cancelled:
            self.has_cancelled = True
            await context.abort(grpc.StatusCode.CANCELLED, "Cancelling all calls")
        return await super().RenewLease(request, context)


async def test_a_renewal_that_a_stopping_source_cancels_is_made_again(leases, directory):
    async with (
        serving(PREFILL, leases, kind=StoppingServicer) as port,
        directory.hold(descriptor_at(f"127.0.0.1:{port}")),
    ):
        await asyncio.wait_for(leases.renewed.wait(), WITHIN_S)


async def test_a_source_restarted_at_the_same_address_is_another_peer(leases, directory, listener):
    async with serving(PREFILL, leases) as port:
        old = descriptor_at(f"127.0.0.1:{port}", lease_s=5.0)
        async with directory.hold(old):
            pass
    reborn = replace(PREFILL, peer=PeerKey("prefill-1", "life-2"))
    later = Leases()
    async with serving(reborn, later, port):
        await asyncio.wait_for(listener.changed.wait(), WITHIN_S)
        with pytest.raises(PeerGoneError, match="life-2"):
            async with directory.hold(old):
                pytest.fail("entered")
        assert listener.closed == [PREFILL.peer]
        async with directory.hold(replace(old, incarnation="life-2")) as lease:
            lease.consumed()
        assert await later.releases.get() == ("lease", LeaseOutcome.CONSUMED)
        assert later.releases.empty(), "a release of the old life reached the new one"
        assert directory.peers == {reborn.peer}


async def test_a_release_is_repeated_until_it_arrives(leases, directory):
    async with serving(PREFILL, leases) as port:
        pass
    directory.release(descriptor_at(f"127.0.0.1:{port}"), LeaseOutcome.CONSUMED)
    await asyncio.sleep(0.1)
    async with serving(PREFILL, leases, port):
        assert await asyncio.wait_for(leases.releases.get(), WITHIN_S) == ("lease", LeaseOutcome.CONSUMED)


async def test_leaving_the_directory_delivers_what_is_on_its_way(source, channels, listener, leases):
    timings = replace(TIMINGS, flush_s=WITHIN_S)
    async with PeerDirectory.serve(SourceCalls(DECODE, channels, from_call), listener, timings) as directory:
        directory.release(descriptor_at(source), LeaseOutcome.ABANDONED)
    assert leases.releases.get_nowait() == ("lease", LeaseOutcome.ABANDONED)


async def test_calls_that_name_another_life_never_reach_the_leases(source, channels, leases):
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels(source))
    await stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id="lease", incarnation="life-0"))
    assert leases.releases.empty()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.RenewLease(pb.RenewLeaseRequest(lease_id="lease", incarnation="life-0"))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    assert leases.renewals == 0


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        (pb.LEASE_OUTCOME_CONSUMED, LeaseOutcome.CONSUMED),
        (pb.LEASE_OUTCOME_ABANDONED, LeaseOutcome.ABANDONED),
        (pb.LEASE_OUTCOME_UNSPECIFIED, LeaseOutcome.ABANDONED),
        (pb.LEASE_OUTCOME_EXPIRED, LeaseOutcome.ABANDONED),
        (77, LeaseOutcome.ABANDONED),
    ],
)
async def test_whatever_is_not_consumed_is_abandoned(source, channels, leases, value, outcome):
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels(source))
    request = pb.ReleaseLeaseRequest(lease_id="lease", incarnation="life-1", outcome=value)
    request.pair_secret = (await stub.Handshake(wire.endpoint_to_request(DECODE))).pair_secret
    await stub.ReleaseLease(request)
    assert await leases.releases.get() == ("lease", outcome)


@pytest.mark.parametrize(
    ("field_name", "clear"),
    [
        ("worker_id", lambda request: request.ClearField("worker_id")),
        ("host_id", lambda request: request.ClearField("host_id")),
        ("fingerprint.model", lambda request: request.ClearField("fingerprint")),
        ("fingerprint.dtype", lambda request: request.fingerprint.ClearField("dtype")),
        ("fingerprint.weights", lambda request: setattr(request.fingerprint, "weights", "0" * 31)),
        ("fingerprint.tokenizer", lambda request: setattr(request.fingerprint, "tokenizer", "A" * 32)),
        ("layout.num_layers", lambda request: request.ClearField("layout")),
        ("layout.dtype", lambda request: setattr(request.layout, "dtype", "int4")),
    ],
)
async def test_a_handshake_that_leaves_something_out_is_told_which_field(source, channels, field_name, clear):
    request = wire.endpoint_to_request(DECODE)
    clear(request)
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channels(source))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stub.Handshake(request)
    error = from_call(failure.value)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field_name


async def test_a_growing_cache_is_followed_to_its_end(source, directory, leases):
    told: list[Growth] = []
    complete = asyncio.Event()

    def tell(growth: Growth) -> None:
        told.append(growth)
        if growth.first_token_ids:
            complete.set()

    growing = descriptor_at(source, block_ids=(), is_growing=True, lease_s=5.0)
    async with asyncio.timeout(WITHIN_S), directory.hold(growing) as lease:
        assert lease.pool is not None
        lease.follow(tell)
        parts = [Growth((5, 6)), Growth((7,)), Growth((), (0, 5))]  # a token's id may be 0
        for growth in parts:
            leases.growth.put_nowait(growth)
        await complete.wait()
        assert told == parts
        lease.consumed()
    assert await leases.releases.get() == ("lease", LeaseOutcome.CONSUMED)


async def test_a_growing_lease_that_ends_early_cancels_its_holder(source, directory, leases):
    async def hold() -> None:
        async with directory.hold(descriptor_at(source, block_ids=(), is_growing=True)) as lease:
            lease.follow(lambda growth: leases.growth.put_nowait(None))
            leases.growth.put_nowait(Growth((5,)))
            await asyncio.Event().wait()

    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(StaleLeaseError):
            await hold()
    assert await leases.releases.get() == ("lease", LeaseOutcome.ABANDONED)


async def test_a_source_that_dies_while_its_cache_grows_cancels_the_holder(leases, directory):
    async with serving(PREFILL, leases) as port:
        source = f"127.0.0.1:{port}"
        following = asyncio.Event()

        async def hold() -> None:
            growing = descriptor_at(source, block_ids=(), is_growing=True, lease_s=60.0)
            async with directory.hold(growing) as lease:
                lease.follow(lambda growth: following.set())
                await asyncio.Event().wait()

        leases.growth.put_nowait(Growth((5,)))
        holding = asyncio.ensure_future(hold())
        await following.wait()
    with pytest.raises(PeerGoneError):
        async with asyncio.timeout(WITHIN_S):
            await holding


async def test_leaving_the_block_ends_the_following(source, directory, leases):
    async with directory.hold(descriptor_at(source, block_ids=(), is_growing=True)) as lease:
        lease.follow(lambda growth: None)
    assert await leases.releases.get() == ("lease", LeaseOutcome.ABANDONED)


async def test_a_growing_descriptor_names_no_blocks(source, directory, leases):
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        async with directory.hold(descriptor_at(source, is_growing=True)):
            pass


async def test_only_a_pair_may_follow(source, leases):
    async with grpc.aio.insecure_channel(source) as channel:
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
        for secret, incarnation, code in (
            (b"x" * 48, "life-1", grpc.StatusCode.UNAUTHENTICATED),
            (SECRETS.mint(), "life-0", grpc.StatusCode.NOT_FOUND),
        ):
            request = pb.FollowLeaseRequest(lease_id="lease", incarnation=incarnation, pair_secret=secret)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.FollowLease(request).read()
            assert caught.value.code() is code
