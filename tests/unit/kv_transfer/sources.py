"""Each transport's source with a reader of it, behind one shape, for the contract suite."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unittest import mock

import grpc
import torch

from baton.core.clock import ManualClock
from baton.core.model import KVLayout, ModelFingerprint
from baton.engine.kv_pool import KVPool
from baton.rpc.errors import from_call
from baton.rpc.interceptors import ErrorInterceptor
from baton.v1 import kv_transfer_pb2_grpc
from kv_transfer import dist_source
from kv_transfer.block_stream import BlockStream, Piece
from kv_transfer.descriptor import Growth, GrpcHandle, KVDescriptor, PeerKey, PeerPool, Transport
from kv_transfer.destination import flat_blocks
from kv_transfer.dist_reader import DistReader
from kv_transfer.dist_source import DistSource
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.grpc_reader import GrpcReader
from kv_transfer.handshake import Endpoint
from kv_transfer.lease import Lease, LeaseTable
from kv_transfer.memory import MemoryPool
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.service import KvTransferServicer
from kv_transfer.shm import ShmPool, ShmReader
from kv_transfer.source import DistPlace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kv_transfer.lease import LeaseOutcome
    from kv_transfer.transport import KVReader

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
PEER = PeerKey("prefill-1", "life-1")
NUM_BLOCKS = 16
NUM_SLOTS = 12
# A busy machine may keep either side from going on for a while; who waits in vain does not wait for long.
TIMEOUT_S, SHORT_TIMEOUT_S = 60.0, 1.0


def describe(lease: Lease, *, address: str = "localhost:1") -> KVDescriptor:
    return KVDescriptor(
        lease_id=lease.lease_id,
        lease_slot=lease.slot,
        generation=lease.generation,
        worker_id=PEER.worker_id,
        incarnation=PEER.incarnation,
        address=address,
        block_ids=lease.block_ids,
        num_tokens=len(lease.block_ids) * LAYOUT.block_size - 1,
        lease_s=5.0,
    )


@dataclass
class Source:
    """A source whose blocks hold noise.

    `open_reader` takes a time-out where `needs_source`. `meanwhile(action)` has `action` called in the middle of every
    copy, on whichever thread makes it; `corrupt` damages all that is sent from now on. Both None where nothing of ours
    takes part in the copy.
    """

    pool: KVPool
    leases: LeaseTable
    open_reader: Callable[..., KVReader]
    close: Callable[[], None]
    meanwhile: Callable[[Callable[[], None]], None]
    corrupt: Callable[[], None] | None = None
    mint: Callable[[], bytes] | None = None
    needs_source: bool = True
    name: str = ""

    def grant(self, *block_ids: int, lease_id: str = "lease") -> KVDescriptor:
        return describe(self.leases.grant(lease_id, "attempt", block_ids))


def _filled(storage: torch.Tensor) -> KVPool:
    pool = KVPool(LAYOUT, NUM_BLOCKS, storage=storage)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(3)))
    return pool


@contextmanager
def memory_source() -> Iterator[Source]:
    yield from _addressed("memory", MemoryPool(LAYOUT, NUM_BLOCKS, peer=PEER, num_slots=NUM_SLOTS), None)


@contextmanager
def shm_source() -> Iterator[Source]:
    shm = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=NUM_SLOTS)
    peer_pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=(shm.handle,))
    yield from _addressed("shm", shm, lambda: ShmReader.open(peer_pool, shm.handle))


def _addressed(
    name: str, backing: MemoryPool | ShmPool, open_reader: Callable[[], KVReader] | None
) -> Iterator[Source]:
    leases = LeaseTable(backing.fences, ManualClock(), lease_s=5.0)
    actions: list[Callable[[], None]] = []

    def open_with_hook() -> KVReader:
        reader = backing.open_reader() if isinstance(backing, MemoryPool) else open_reader()
        copy = reader._memory.copy

        def copy_and_act(*arguments):
            copy(*arguments)
            for action in actions:
                action()

        reader._memory.copy = copy_and_act
        return reader

    yield Source(
        _filled(backing.storage), leases, open_with_hook, backing.close, actions.append, needs_source=False, name=name
    )
    backing.close()


class TableLeases:
    """A `LeaseHolder` right over the table."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._pair_of: dict[str, str] = {}

    def leased_blocks(self, lease_id: str, pair: str) -> Lease:
        lease = self._table.find(lease_id)
        if lease is None or self._pair_of.setdefault(lease_id, pair) != pair:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        return lease

    async def follow_lease(self, lease_id: str, pair: str) -> AsyncIterator[Growth]:
        yield Growth(self.leased_blocks(lease_id, pair).block_ids)

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        self.leased_blocks(lease_id, pair)
        return self._table.renew(lease_id)

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        with suppress(LeaseNotFoundError):
            self.leased_blocks(lease_id, pair)
            self._table.release(lease_id, outcome)


ENDPOINT = Endpoint(
    peer=PEER,
    host_id="host",
    fingerprint=ModelFingerprint(model="m", weights="a1" * 16, tokenizer="b1" * 16, dtype="bfloat16"),
    layout=LAYOUT,
)


@contextmanager
def serving(servicer: Callable[[], KvTransferServicer]) -> Iterator[str]:
    """A source's gRPC server on a loop and thread of its own, as it is a process of its own; yields its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(interceptors=[ErrorInterceptor()])
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@contextmanager
def grpc_source(*, max_message_bytes: int = 4 * 2**20) -> Iterator[Source]:
    shm = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=NUM_SLOTS)
    leases = LeaseTable(shm.fences, ManualClock(), lease_s=5.0)
    secrets = PairSecrets(new_key())
    streams: list[BlockStream] = []
    actions: list[Callable[[], None]] = []
    damage: list[bool] = []

    class HookedStream(BlockStream):
        def _slices(self, *arguments):
            yield from super()._slices(*arguments)
            for action in actions:
                action()

        def _read(self, *arguments):
            piece = super()._read(*arguments)
            return Piece(bytes([piece.data[0] ^ 1]) + piece.data[1:], piece.crc32) if damage else piece

    def make_servicer() -> KvTransferServicer:
        streams.append(HookedStream(PEER, LAYOUT, shm.handle, max_message_bytes=max_message_bytes))
        return KvTransferServicer(ENDPOINT, [GrpcHandle()], secrets, TableLeases(leases), streams[0])

    with ExitStack() as stack:
        stack.callback(shm.close)
        stack.callback(lambda: streams[0].close())
        address = stack.enter_context(serving(make_servicer))
        pool = PeerPool(peer=PEER, layout=LAYOUT, address=address, secret=secrets.mint(), handles=(GrpcHandle(),))

        def open_reader(timeout_s: float = TIMEOUT_S) -> KVReader:
            return GrpcReader(
                pool,
                grpc.insecure_channel(address),
                from_call,
                max_message_bytes=max_message_bytes,
                timeout_s=timeout_s,
            )

        yield Source(
            _filled(shm.storage),
            leases,
            open_reader,
            shm.close,
            actions.append,
            corrupt=lambda: damage.append(True),
            mint=secrets.mint,
            name="grpc",
        )


@contextmanager
def gloo_source(*, timeout_s: float = TIMEOUT_S) -> Iterator[Source]:
    """`timeout_s` is the source's own."""
    shm = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=NUM_SLOTS)
    leases = LeaseTable(shm.fences, ManualClock(), lease_s=5.0)
    secrets = PairSecrets(new_key())
    actions: list[Callable[[], None]] = []

    class HookedSource(DistSource):
        def is_live(self, lease):
            for action in actions:
                action()
            return super().is_live(lease)

    place = DistPlace(host="127.0.0.1", advertised_host="127.0.0.1", timeout_s=timeout_s)
    pool = _filled(shm.storage)
    source = HookedSource(Transport.GLOO, flat_blocks(pool.tensor), leases.find, secrets, place)
    peer_pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=secrets.mint(), handles=(source.handle,))
    with ExitStack() as stack:
        stack.callback(shm.close)
        stack.callback(source.close)

        def corrupt() -> None:
            patch = mock.patch.object(dist_source, "checksum", return_value=1)
            patch.start()
            stack.callback(patch.stop)

        yield Source(
            pool,
            leases,
            lambda timeout_s=TIMEOUT_S: DistReader(peer_pool, source.handle, timeout_s=timeout_s),
            shm.close,
            actions.append,
            corrupt=corrupt,
            mint=secrets.mint,
            name="gloo",
        )


SOURCES = {"memory": memory_source, "shm": shm_source, "grpc": grpc_source, "gloo": gloo_source}
ADDRESSED = {"memory": memory_source, "shm": shm_source}


def relaid(layout: KVLayout = LAYOUT, **changes: int | str) -> KVLayout:
    return replace(layout, **changes)
