"""The reader's side of the handover benchmark, and its line to the source's process."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc

from baton.engine.native.build import build
from baton.engine.native.move import NativeMove
from baton.rpc.channels import client_options
from baton.rpc.errors import from_call
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from benchmarks.handover_source import MAX_MESSAGE_BYTES, PEER
from kv_transfer import wire
from kv_transfer.descriptor import DistHandle, GrpcHandle, KVDescriptor, PeerPool, ShmHandle, Transport
from kv_transfer.ways import ReaderFactory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.core.model import KVLayout
    from kv_transfer.descriptor import Growth, PoolHandle
    from kv_transfer.transport import KVReader


@dataclass(frozen=True, slots=True)
class Computed:
    """A prompt that the source has computed: when it had it, by this host's clock, and each chunk's seconds."""

    ended_at_s: float
    chunks_s: tuple[float, ...]


class Source:
    """The other process, and readers of its pool."""

    def __init__(self, process: subprocess.Popen[str], order: dict[str, Any], layout: KVLayout) -> None:
        self._process = process
        found = self._ask(json.dumps(order | {"layout": asdict(layout)}))
        handles: dict[str, PoolHandle] = {
            "shm": ShmHandle(**found["handles"]["shm"]),
            "gloo": DistHandle(**found["handles"]["gloo"], transport=Transport.GLOO),
            "grpc": GrpcHandle(),
        }
        self.address: str = found["address"]
        self.raw_port: int = found["raw_port"]
        self._layout = layout
        self._secret = bytes.fromhex(found["secret"])
        self._channel = grpc.insecure_channel(self.address, client_options(MAX_MESSAGE_BYTES))
        pool = PeerPool(
            peer=PEER,
            layout=layout,
            address=self.address,
            secret=self._secret,
            handles=tuple(handles.values()),
        )
        factory = ReaderFactory(
            channel=lambda address: grpc.insecure_channel(address, client_options(MAX_MESSAGE_BYTES)),
            from_call=from_call,
            max_message_bytes=MAX_MESSAGE_BYTES,
            timeout_s=30.0,
            move=ctypes.memmove if (library := build()) is None else NativeMove(library),
        )
        self.readers: dict[str, KVReader] = {name: factory(pool, handle) for name, handle in handles.items()}

    def grant(self, block_ids: list[int]) -> KVDescriptor:
        """A lease on these blocks."""
        return self._describe(self._ask(json.dumps({"lease": block_ids})), tuple(block_ids))

    def compute(self, num_tokens: int, chunk_tokens: int) -> KVDescriptor:
        """Has a prompt computed in chunks; returns its growing lease when the first one is. `computed` is to follow."""
        order = {"compute": num_tokens, "chunk_tokens": chunk_tokens}
        return replace(self._describe(self._ask(json.dumps(order)), ()), is_growing=True, num_tokens=num_tokens)

    def follow(self, descriptor: KVDescriptor) -> Iterator[Growth]:
        """What may be read, as the source tells its reader."""
        request = kv_transfer_pb2.FollowLeaseRequest(
            lease_id=descriptor.lease_id, incarnation=descriptor.incarnation, pair_secret=self._secret
        )
        for message in kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel).FollowLease(request):
            yield wire.growth_from_proto(message)

    def computed(self) -> Computed:
        """When the prompt that was last asked for was there."""
        told = self._hear()
        return Computed(told["ended_at_s"], tuple(told["chunks_s"]))

    def close(self) -> None:
        """Gives the readers up."""
        for reader in self.readers.values():
            reader.close()
        self._channel.close()

    def _describe(self, granted: dict[str, Any], block_ids: tuple[int, ...]) -> KVDescriptor:
        return KVDescriptor(
            lease_id=granted["lease_id"],
            lease_slot=granted["slot"],
            generation=granted["generation"],
            worker_id=PEER.worker_id,
            incarnation=PEER.incarnation,
            address=self.address,
            block_ids=block_ids,
            num_tokens=len(block_ids) * self._layout.block_size,
            lease_s=3600.0,
        )

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def source_of(layout: KVLayout, num_blocks: int, model: Path | None = None) -> Iterator[Source]:
    """A source with so large a pool, and with an engine if there is a `model`, for as long as the block."""
    order = {"num_blocks": num_blocks, "model": None if model is None else str(model)}
    command = [sys.executable, "-m", "benchmarks.handover_source"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            source = Source(process, order, layout)
            yield source
            source.close()
            process.communicate()
        finally:
            process.kill()
