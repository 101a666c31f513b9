from __future__ import annotations

from baton.core.interrupts import end_quietly_until_handled

if __name__ == "__main__":  # the imports below take a second and more
    end_quietly_until_handled()

import sys
from typing import TYPE_CHECKING

from baton.core.clock import SystemClock
from baton.core.ids import host_id
from baton.core.workers import WorkerRole
from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.worker.description import WorkerDescription
from baton.worker.engine_client import EngineClient
from baton.worker.host import WorkerHost, run_worker
from baton.worker.life import WorkerLife
from baton.worker.metrics import LoadMetrics
from kv_transfer.block_stream import BlockStream
from kv_transfer.descriptor import GrpcHandle, PeerKey, ShmHandle
from kv_transfer.handshake import Endpoint
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.segment import reap_stale_segments
from kv_transfer.service import KvTransferServicer
from prefill_worker.engine_process import PrefillFacts, PrefillSpec, run_prefill_engine
from prefill_worker.leases import LiveLeases
from prefill_worker.service import PrefillServicer
from prefill_worker.settings import PrefillWorkerSettings

if TYPE_CHECKING:
    import asyncio

    from baton.engine.process import EngineProcess
    from baton.engine.rank_hardware import RankHardware
    from baton.worker.engine_loop import EventBatch
    from kv_transfer.descriptor import PoolHandle
    from prefill_worker.messages import PrefillCommand, PrefillEvent


async def serve(settings: PrefillWorkerSettings, stop: asyncio.Event, hardware: RankHardware | None = None) -> None:
    """Runs a prefill worker until `stop` is set. `hardware`: as in `PrefillSpec`."""
    async with WorkerHost.open(settings) as host:
        spec = PrefillSpec(settings=settings, incarnation=host.incarnation, pair_key=new_key(), hardware=hardware)
        try:
            async with host.engine(run_prefill_engine, spec, stop) as process:
                if process is not None:
                    await _serve_ready(settings, host, process, stop, PairSecrets(spec.pair_key))
        finally:
            # An engine that was killed could not unlink its segment.
            reap_stale_segments()


async def _serve_ready(
    settings: PrefillWorkerSettings,
    host: WorkerHost,
    process: EngineProcess[PrefillCommand, EventBatch],
    stop: asyncio.Event,
    secrets: PairSecrets,
) -> None:
    facts: PrefillFacts = process.facts
    engine: EngineClient[PrefillEvent] = EngineClient(process, SystemClock())
    leases = LiveLeases(engine.control, settings.lease.lease_s, host.instruments)
    engine.add_observer(leases.observe)
    engine.add_observer(LoadMetrics.of(host.instruments, facts.engine).observe)
    life = WorkerLife(host.server, engine, host.registry, settings)
    description = WorkerDescription(
        worker_id=settings.worker_id,
        incarnation=host.incarnation,
        role=WorkerRole.PREFILL,
        address=lambda: host.server.address,
        host_id=host_id(),
        max_num_seqs=settings.engine.max_num_seqs,
        facts=facts.engine,
        caches_prefixes=settings.prefix_cache,
    )
    host.server.add(
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(engine, life, description, settings, (host.tracer, host.instruments)),
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
    )
    endpoint = Endpoint(
        peer=PeerKey(description.worker_id, description.incarnation),
        host_id=description.host_id,
        fingerprint=facts.engine.fingerprint,
        layout=facts.engine.layout,
    )
    host.server.add(
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        _kv_transfer_servicer(settings, facts, endpoint, secrets, leases),
        kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"],
    )
    await host.server.start()
    await life.run(description, stop)


def _kv_transfer_servicer(
    settings: PrefillWorkerSettings, facts: PrefillFacts, endpoint: Endpoint, secrets: PairSecrets, leases: LiveLeases
) -> KvTransferServicer:
    """Offers the ways that lead to the engine's pool and are enabled, and gRPC where this process can map the pool."""
    handles: list[PoolHandle] = [*facts.handles]
    stream: BlockStream | None = None
    for handle in facts.handles:
        if isinstance(handle, ShmHandle):
            handles.append(GrpcHandle())
            stream = BlockStream(
                endpoint.peer, endpoint.layout, handle, max_message_bytes=settings.server.max_message_bytes
            )
    enabled = [handle for handle in handles if handle.transport in settings.handover.enabled]
    return KvTransferServicer(endpoint, enabled, secrets, leases, stream)


if __name__ == "__main__":
    sys.exit(run_worker(PrefillWorkerSettings, serve, sys.argv[1:]))
