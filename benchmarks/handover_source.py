"""The source's side of the handover benchmark: a process of its own, as a prefill worker is one. Speaks JSON lines."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import torch

from baton.core.clock import SystemClock
from baton.core.model import KVLayout, ModelFingerprint
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.server import server_options
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from benchmarks.engine_under_test import BLOCK_SIZE, BatonEngine
from benchmarks.limits import timed
from kv_transfer.block_stream import PIECE_BYTES, BlockStream
from kv_transfer.descriptor import Growth, GrpcHandle, PeerKey, ShmHandle, Transport
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.handshake import Endpoint
from kv_transfer.lease import LeaseTable
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.segment import SegmentSpec
from kv_transfer.service import KvTransferServicer
from kv_transfer.source import DistPlace, SourcePool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kv_transfer.lease import Lease, LeaseOutcome

PEER = PeerKey("prefill-bench", "life-1")
MAX_MESSAGE_BYTES = 4 * 2**20
RAW_METHOD = "/benchmark.Raw/Stream"
_HOST = "127.0.0.1"


class _TableLeases:
    """A `LeaseHolder` right over the table: here server and engine are one process."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._news = asyncio.Event()

    def grow(self, lease_id: str, block_ids: range, *, is_complete: bool) -> None:
        """More of a growing cache is computed; its follower hears of it."""
        self._table.grow(lease_id, block_ids, is_complete=is_complete)
        self._news.set()
        self._news = asyncio.Event()

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        return self._table.renew(lease_id)

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        self._table.release(lease_id, outcome)

    async def follow_lease(self, lease_id: str, pair: str) -> AsyncIterator[Growth]:
        num_told = 0
        while True:
            news, lease = self._news, self.leased_blocks(lease_id, pair)
            yield Growth(lease.block_ids[num_told:], () if lease.is_growing else (0,))
            num_told = len(lease.block_ids)
            if not lease.is_growing:
                return
            await news.wait()

    def leased_blocks(self, lease_id: str, pair: str) -> Lease:
        lease = self._table.find(lease_id)
        if lease is None:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        return lease


class _RawStream(grpc.GenericRpcHandler):
    """Streams ready-made messages: what gRPC itself can carry, without a look at blocks, leases or checksums."""

    def __init__(self) -> None:
        piece = kv_transfer_pb2.PullBlocksResponse(data=bytes(PIECE_BYTES), crc32=1)
        self._message = piece.SerializeToString()

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method != RAW_METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._stream)

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield self._message


class _Bench:
    """Does what the lines of standard input ask for."""

    def __init__(self, table: LeaseTable, leases: _TableLeases, engine: BatonEngine | None) -> None:
        self._table = table
        self._leases = leases
        self._engine = engine
        self._number = 0

    async def obey(self, order: dict[str, Any]) -> None:
        """Leases blocks, or computes a prompt and leases its blocks chunk by chunk."""
        self._number += 1
        lease_id = f"lease-{self._number}"
        if "lease" in order:
            self._tell_lease(self._table.grant(lease_id, lease_id, order["lease"]))
        else:
            await self._compute(lease_id, order["compute"], order["chunk_tokens"])

    async def _compute(self, lease_id: str, num_tokens: int, chunk_tokens: int) -> None:
        assert self._engine is not None, "the source was started with a model"
        chunks_s: list[float] = []
        for start in range(0, num_tokens, chunk_tokens):
            end = min(start + chunk_tokens, num_tokens)
            chunks_s.append(await asyncio.to_thread(timed, partial(self._engine.prefill, end - start, start)))
            ended_at_s = time.monotonic()
            blocks = range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
            if start == 0:
                self._tell_lease(self._table.grant(lease_id, lease_id, blocks, is_growing=True))
            else:
                self._leases.grow(lease_id, blocks, is_complete=end == num_tokens)
        _tell(ended_at_s=ended_at_s, chunks_s=chunks_s)

    def _tell_lease(self, lease: Lease) -> None:
        _tell(lease_id=lease.lease_id, slot=lease.slot, generation=lease.generation)


async def _serve(pool: SourcePool, leases: LeaseTable, secrets: PairSecrets, order: dict[str, Any]) -> None:
    """Serves gRPC, and obeys standard input until it ends."""
    layout = KVLayout(**order["layout"])
    shm = next(handle for handle in pool.handles if isinstance(handle, ShmHandle))
    stream = BlockStream(PEER, layout, shm, max_message_bytes=MAX_MESSAGE_BYTES)
    endpoint = Endpoint(
        peer=PEER,
        host_id="bench",
        fingerprint=ModelFingerprint(model="m", weights="a1" * 16, tokenizer="b1" * 16, dtype=layout.dtype),
        layout=layout,
    )
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=server_options(MAX_MESSAGE_BYTES))
    holder = _TableLeases(leases)
    servicer = KvTransferServicer(endpoint, [GrpcHandle()], secrets, holder, stream)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((_RawStream(),))
    port = server.add_insecure_port(f"{_HOST}:0")
    await server.start()
    handles = {
        handle.transport.value: {name: value for name, value in asdict(handle).items() if name != "transport"}
        for handle in pool.handles
    }
    model = order["model"]
    bench = _Bench(
        leases, holder, model and BatonEngine(Path(model), layout.dtype, order["num_blocks"], storage=pool.storage)
    )
    _tell(address=f"{_HOST}:{port}", secret=secrets.mint().hex(), handles=handles, raw_port=_raw_socket())
    while line := await asyncio.to_thread(sys.stdin.readline):
        await bench.obey(json.loads(line))
    await server.stop(None)
    stream.close()


def _raw_socket() -> int:
    """A port that sends as many bytes as it is asked for, from one buffer: what loopback TCP carries."""
    listening = socket.create_server((_HOST, 0))

    def serve() -> None:
        buffer = bytes(PIECE_BYTES)
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            while request := connection.recv(8, socket.MSG_WAITALL):
                left = int.from_bytes(request, "big")
                while left:
                    connection.sendall(memoryview(buffer)[: min(left, len(buffer))])
                    left -= min(left, len(buffer))

    threading.Thread(target=serve, daemon=True).start()
    return int(listening.getsockname()[1])


def _tell(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def main() -> None:
    """Makes a pool as the first line of standard input says."""
    order = json.loads(sys.stdin.readline())
    spec = SegmentSpec(
        layout=KVLayout(**order["layout"]), num_blocks=order["num_blocks"], num_slots=64, incarnation=PEER.incarnation
    )
    if order["model"] is None:
        torch.set_num_threads(1)
    pool = SourcePool.create(spec, "cpu")
    try:
        pool.storage.view(torch.int64).copy_(torch.arange(pool.storage.numel() // 8))  # the pages are there now
        leases = LeaseTable(pool.fences, SystemClock(), lease_s=3600.0)
        secrets = PairSecrets(new_key())
        place = DistPlace(host=_HOST, advertised_host=_HOST, timeout_s=30.0)
        pool.start_senders([Transport.GLOO], leases, secrets, place)
        asyncio.run(_serve(pool, leases, secrets, order))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
