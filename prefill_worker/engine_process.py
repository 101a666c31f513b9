"""The prefill worker's engine process: owns the model, the KV blocks in shared memory and their leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.clock import SystemClock
from baton.engine.block_pool import BlockPool
from baton.telemetry.logging import setup_logging
from baton.worker.engine_loop import EngineLoop
from baton.worker.start_up import load
from kv_transfer.lease import LeaseTable
from prefill_worker.engine_core import PrefillCore

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.channel import ChildChannel
    from baton.engine.kv_pool import KVPool
    from baton.worker.engine_loop import EventBatch
    from baton.worker.start_up import EngineFacts
    from kv_transfer.descriptor import PoolHandle
    from prefill_worker.messages import PrefillCommand
    from prefill_worker.settings import PrefillWorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """What the engine process is started with."""

    settings: PrefillWorkerSettings
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """What the server process learns when the engine is ready. `handles` are the ways to the pool that lead here."""

    engine: EngineFacts
    handles: tuple[PoolHandle, ...]


def run_prefill_engine(channel: ChildChannel[PrefillCommand, EventBatch], spec: PrefillSpec) -> None:
    """The engine process's whole life. However it ends, the segment is unlinked, but for SIGKILL: then by the next."""
    from baton.engine.kv_pool import KVPool
    from kv_transfer.shm import ShmPool

    settings = spec.settings
    setup_logging(settings.telemetry, "prefill_engine")
    segments: list[ShmPool] = []

    def make_pool(layout: KVLayout, num_blocks: int) -> KVPool:
        segment = ShmPool.create(
            layout, num_blocks, incarnation=spec.incarnation, num_slots=settings.limits.max_num_seqs
        )
        segments.append(segment)
        return KVPool(layout, num_blocks, storage=segment.storage)

    try:
        loaded = load(settings.model, settings.engine, make_pool)
        (segment,) = segments
        clock = SystemClock()
        leases = LeaseTable(segment.fences, clock, lease_s=settings.lease.lease_s)
        blocks = BlockPool(loaded.facts.num_blocks, loaded.facts.layout.block_size)
        core = PrefillCore(blocks, settings.limits, leases, clock)
        channel.ready(PrefillFacts(engine=loaded.facts, handles=(segment.handle,)))
        EngineLoop(core, loaded.executor, clock).run(channel)
        leases.end_all()
    finally:
        for segment in segments:
            segment.close()
