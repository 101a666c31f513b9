"""The reader's side of the protocol, in a decode worker's server process."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from baton.core.errors import ServingError
from kv_transfer.errors import NoTransportError, PeerGoneError
from kv_transfer.lease import LeaseOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Self

    from kv_transfer.calls import SourceCalls
    from kv_transfer.descriptor import Growth, KVDescriptor, PeerKey, PeerPool

_log = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 3
_MAX_PENDING_RELEASES = 4096


class PeerListener(Protocol):
    """Told of peers in order; the decode worker passes it on to its engine's `PeerReaders`. Must not block."""

    def peer_opened(self, pool: PeerPool) -> None:
        """Descriptors of this peer may be read from now on."""
        ...

    def peer_closed(self, peer: PeerKey) -> None:
        """The peer is dead: give up its memory now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimings:
    """How long a silent source is believed in, how often known ones are looked after, how long the end may take."""

    silence_s: float = 2.0
    probe_interval_s: float = 1.0
    flush_s: float = 2.0


class HeldLease:
    """A lease that is being renewed. Exactly one release is sent for it, whatever happens."""

    def __init__(
        self,
        release: Callable[[LeaseOutcome, bytes | None], None],
        follow: Callable[[Callable[[Growth], None]], None],
    ) -> None:
        self.pool: PeerPool | None = None
        """Where its blocks lie; known inside the block."""
        self._release = release
        self._follow = follow
        self._ended = False

    @property
    def secret(self) -> bytes | None:
        """Of the pair that first named the lease, once there is one."""
        return None if self.pool is None else self.pool.secret

    def follow(self, tell: Callable[[Growth], None]) -> None:
        """Has `tell` called with all that may be read of a growing cache, in order, while the block is not left.

        When that breaks off before the cache is complete, the block is cancelled as for a lost lease.
        """
        self._follow(tell)

    def consumed(self) -> None:
        """The blocks are in this worker's pool: the source may have its own back."""
        self._end(LeaseOutcome.CONSUMED)

    def abandon(self) -> None:
        """The blocks are not wanted any more. Nothing to do after `consumed`."""
        self._end(LeaseOutcome.ABANDONED)

    @property
    def is_ended(self) -> bool:
        """Whether the release was sent."""
        return self._ended

    def _end(self, outcome: LeaseOutcome) -> None:
        if not self._ended:
            self._ended = True
            self._release(outcome, self.secret)


class PeerDirectory:
    """The prefill workers that this process knows, one entry a life of each, and the leases held on them.

    To be used inside `serve`. A peer becomes known by the first lease held on it, and is forgotten when it has not
    answered for `silence_s` or when another life answers at its address.
    """

    def __init__(
        self, calls: SourceCalls, listener: PeerListener, tasks: asyncio.TaskGroup, timings: PeerTimings
    ) -> None:
        self._calls = calls
        self._listener = listener
        self._tasks = tasks
        self._timings = timings
        self._pools: dict[PeerKey, PeerPool] = {}
        self._connecting: WeakValueDictionary[PeerKey, asyncio.Lock] = WeakValueDictionary()
        self._releases: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def serve(
        cls, calls: SourceCalls, listener: PeerListener, timings: PeerTimings | None = None
    ) -> AsyncIterator[Self]:
        """A directory that watches its peers and delivers releases until the block is left.

        Leaving waits up to `flush_s` for releases on their way; what is lost then ends by expiry at the source.
        """
        async with asyncio.TaskGroup() as tasks:
            directory = cls(calls, listener, tasks, timings or PeerTimings())
            watching = tasks.create_task(directory._watch())
            try:
                yield directory
            finally:
                watching.cancel()
                await directory._flush()

    @property
    def peers(self) -> frozenset[PeerKey]:
        """The peers known at this moment."""
        return frozenset(self._pools)

    @asynccontextmanager
    async def hold(self, descriptor: KVDescriptor) -> AsyncIterator[HeldLease]:
        """Makes the descriptor's peer known and renews the lease until the block is left or `consumed` is called.

        However the block is left, the source hears of it: as abandoned unless `consumed` was called. When the lease
        is lost the block is cancelled, and StaleLeaseError or PeerGoneError comes out of it. The destination's
        blocks are the caller's: a read that is under way goes on, and they must rest until it has ended.

        Entering raises FailedPreconditionError when the two workers do not fit (NoTransportError when nothing joins
        them), InvalidArgumentError when the blocks are not as many as the tokens need, and PeerGoneError when the
        source doesn't answer. A source that refuses the handshake gives no secret, and so cannot be told of the
        abandonment: there the lease ends by expiry, or sooner by whoever sent the descriptor.
        """
        beside: list[asyncio.Task[None]] = []

        def follow(tell: Callable[[Growth], None]) -> None:
            beside.append(tasks.create_task(self._tell_growth(descriptor, lease, tell)))

        lease = HeldLease(lambda outcome, secret: self._send_release(descriptor, outcome, secret), follow)
        try:
            async with asyncio.TaskGroup() as tasks:
                beside.append(tasks.create_task(self._keep_alive(descriptor, lease)))
                try:
                    pool = lease.pool = await self._connect(descriptor)
                    if not pool.handles:
                        raise NoTransportError(
                            f"no transport joins this worker and {pool.peer}: see handover.transports of both"
                        )
                    descriptor.require_fits(pool.layout)
                    yield lease
                finally:
                    for task in beside:
                        task.cancel()
        except BaseExceptionGroup as group:
            # The renewal's failure or the block's own: whoever holds one lease has one reason to fail.
            raise group.exceptions[0] from None
        finally:
            lease.abandon()

    def release(self, descriptor: KVDescriptor, outcome: LeaseOutcome) -> None:
        """Sends a release, repeated until it arrives or the lease must have expired. Returns at once.

        For whoever refuses a descriptor without holding it.
        """
        known = self._pools.get(descriptor.peer)
        self._send_release(descriptor, outcome, None if known is None else known.secret)

    def forget(self, peer: PeerKey) -> None:
        """Has everything given up that is held of a peer. A peer that still lives gets a new handshake when needed."""
        if self._pools.pop(peer, None) is not None:
            self._listener.peer_closed(peer)

    def _send_release(self, descriptor: KVDescriptor, outcome: LeaseOutcome, secret: bytes | None) -> None:
        if len(self._releases) >= _MAX_PENDING_RELEASES:
            _log.warning("too many releases on their way: lease %s is left to expire", descriptor.lease_id)
            return
        task = self._tasks.create_task(self._deliver(descriptor, outcome, secret))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _connect(self, descriptor: KVDescriptor) -> PeerPool:
        peer = descriptor.peer
        lock = self._connecting.setdefault(peer, asyncio.Lock())
        async with lock:
            if (known := self._pools.get(peer)) is not None:
                return known
            pool = await self._calls.handshake(descriptor.address, self._timings.silence_s)
            self._forget_former_lives(pool.peer)
            if pool.peer != peer:
                raise PeerGoneError(f"{peer} is gone: {pool.peer} answers at its address")
            self._pools[peer] = pool
            self._note_transport(pool)
            if pool.handles:
                self._listener.peer_opened(pool)
            return pool

    def _note_transport(self, pool: PeerPool) -> None:
        """Says by which way a peer is read, loudly when it is not the cheapest that this worker has."""
        wanted = [transport.value for transport in self._calls.reader.transports]
        found = [handle.transport.value for handle in pool.handles]
        if found[:1] == wanted[:1]:
            _log.info("the KV caches of %s come over %s", pool.peer, ", ".join(found[:1]))
        else:
            _log.warning(
                "the KV caches of %s come over %s: of %s it has no more",
                pool.peer,
                ", then ".join(found) or "no transport",
                ", ".join(wanted),
            )

    def _forget_former_lives(self, living: PeerKey) -> None:
        for peer in self.peers:
            if peer.worker_id == living.worker_id and peer != living:
                self.forget(peer)

    async def _keep_alive(self, descriptor: KVDescriptor, lease: HeldLease) -> None:
        lease_s = descriptor.lease_s
        while True:
            await asyncio.sleep(lease_s / _RENEWALS_PER_LEASE)
            if lease.is_ended:
                return
            lease_s = await self._renew(descriptor, lease, budget_s=lease_s * (1 - 1 / _RENEWALS_PER_LEASE))

    async def _tell_growth(self, descriptor: KVDescriptor, lease: HeldLease, tell: Callable[[Growth], None]) -> None:
        assert lease.secret is not None, "followed inside the block"
        try:
            async for growth in self._calls.follow(descriptor, lease.secret):
                tell(growth)
        except ServingError:
            if not lease.is_ended:
                raise

    async def _renew(self, descriptor: KVDescriptor, lease: HeldLease, *, budget_s: float) -> float:
        try:
            secret = lease.secret or (await self._connect(descriptor)).secret
            return await self._calls.renew(descriptor, secret, budget_s)
        except ServingError:
            if lease.is_ended:  # its release overtook this renewal
                return descriptor.lease_s
            raise

    async def _deliver(self, descriptor: KVDescriptor, outcome: LeaseOutcome, secret: bytes | None) -> None:
        try:
            async with asyncio.timeout(descriptor.lease_s):
                if secret is None:
                    # Not to be kept: nothing will be read.
                    secret = (await self._calls.handshake(descriptor.address, descriptor.lease_s)).secret
                await self._calls.release(descriptor, secret, outcome, budget_s=descriptor.lease_s)
        except (ServingError, TimeoutError) as error:
            _log.info("lease %s is left to expire: %s", descriptor.lease_id, error)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._timings.probe_interval_s)
            async with asyncio.TaskGroup() as probes:
                for peer, pool in self._pools.items():
                    probes.create_task(self._probe(peer, pool.address))

    async def _probe(self, peer: PeerKey, address: str) -> None:
        try:
            pool = await self._calls.handshake(address, self._timings.silence_s)
        except ServingError as error:
            _log.warning("peer %s is forgotten: %s", peer, error)
            self.forget(peer)
            return
        if pool.peer != peer:
            _log.warning("peer %s is forgotten: %s answers at its address", peer, pool.peer)
            self.forget(peer)

    async def _flush(self) -> None:
        if self._releases:
            _, late = await asyncio.wait(self._releases, timeout=self._timings.flush_s)
            for task in late:
                task.cancel()
