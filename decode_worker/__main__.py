from __future__ import annotations

from baton.core.interrupts import end_quietly_until_handled

if __name__ == "__main__":  # the imports below take a second and more
    end_quietly_until_handled()

import sys
from typing import TYPE_CHECKING

from baton.core.clock import SystemClock
from baton.core.ids import host_id
from baton.core.workers import WorkerRole
from baton.rpc.channels import ChannelPool
from baton.rpc.errors import from_call
from baton.v1 import decode_pb2, decode_pb2_grpc
from baton.worker.description import WorkerDescription
from baton.worker.engine_client import EngineClient
from baton.worker.host import WorkerHost, run_worker
from baton.worker.life import WorkerLife
from baton.worker.metrics import LoadMetrics
from decode_worker.engine_process import DecodeSpec, run_decode_engine
from decode_worker.peers import EnginePeers
from decode_worker.service import DecodeLimits, DecodeServicer
from decode_worker.settings import DecodeWorkerSettings
from kv_transfer import choice
from kv_transfer.calls import SourceCalls
from kv_transfer.client import PeerDirectory
from kv_transfer.descriptor import PeerKey
from kv_transfer.handshake import Endpoint

if TYPE_CHECKING:
    import asyncio

    from baton.engine.process import EngineProcess
    from baton.engine.rank_hardware import RankHardware
    from baton.worker.engine_loop import EventBatch
    from baton.worker.start_up import EngineFacts
    from decode_worker.messages import DecodeCommand, DecodeEvent


async def serve(settings: DecodeWorkerSettings, stop: asyncio.Event, hardware: RankHardware | None = None) -> None:
    """Runs a decode worker until `stop` is set. `hardware`: as in `DecodeSpec`."""
    async with (
        WorkerHost.open(settings) as host,
        host.engine(run_decode_engine, DecodeSpec(settings=settings, hardware=hardware), stop) as process,
    ):
        if process is not None:
            await _serve_ready(settings, host, process, stop)


async def _serve_ready(
    settings: DecodeWorkerSettings,
    host: WorkerHost,
    process: EngineProcess[DecodeCommand, EventBatch],
    stop: asyncio.Event,
) -> None:
    facts: EngineFacts = process.facts
    engine: EngineClient[DecodeEvent] = EngineClient(process, SystemClock())
    engine.add_observer(LoadMetrics.of(host.instruments, facts).observe)
    life = WorkerLife(host.server, engine, host.registry, settings)
    description = WorkerDescription(
        worker_id=settings.worker_id,
        incarnation=host.incarnation,
        role=WorkerRole.DECODE,
        address=lambda: host.server.address,
        host_id=host_id(),
        max_num_seqs=settings.engine.max_num_seqs,
        facts=facts,
        converts_dtype=settings.handover.convert_dtype,
    )
    reader = Endpoint(
        peer=PeerKey(description.worker_id, description.incarnation),
        host_id=description.host_id,
        fingerprint=facts.fingerprint,
        layout=facts.layout,
        transports=choice.usable(settings.handover.enabled, _filled_memory(settings)),
        converts_dtype=description.converts_dtype,
    )
    channels = ChannelPool(max_message_bytes=settings.server.max_message_bytes, tracer=host.tracer)
    try:
        calls = SourceCalls(reader, channels.get, from_call)
        async with PeerDirectory.serve(calls, EnginePeers(engine.control)) as peers:
            host.server.add(
                decode_pb2_grpc.add_DecodeServiceServicer_to_server,
                DecodeServicer(
                    engine,
                    peers,
                    (life, description),
                    (host.tracer, host.instruments),
                    limits=DecodeLimits(max_waiting=settings.max_waiting, max_unread_tokens=settings.max_unread_tokens),
                ),
                decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
            )
            await host.server.start()
            await life.run(description, stop)
    finally:
        await channels.close()


def _filled_memory(settings: DecodeWorkerSettings) -> str:
    """Where readers put what they read: several ranks take it from host memory."""
    return settings.engine.device if settings.engine.tensor_parallel_size == 1 else "cpu"


if __name__ == "__main__":
    sys.exit(run_worker(DecodeWorkerSettings, serve, sys.argv[1:]))
