"""The prefill worker's engine process: owns the model, the KV blocks in shared memory and their leases."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.clock import SystemClock
from baton.core.prefixes import PrefixDigests
from baton.core.workers import WorkerRole
from baton.engine.block_pool import BlockPool
from baton.engine.host_needs import HostNeeds
from baton.engine.rank_hardware import ranks_on
from baton.telemetry.logging import setup_logging
from baton.worker.engine_loop import EngineLoop
from baton.worker.start_up import RankHost, load
from kv_transfer.lease import LeaseTable
from kv_transfer.pairs import PairSecrets
from kv_transfer.segment import SegmentSpec
from prefill_worker.engine_core import PrefillCore
from prefill_worker.scheduler import PrefillScheduler

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.channel import ChildChannel
    from baton.engine.host_copy import KVMemory
    from baton.engine.rank_hardware import RankHardware
    from baton.worker.engine_loop import EventBatch
    from baton.worker.start_up import EngineFacts
    from kv_transfer.descriptor import PoolHandle
    from kv_transfer.source import SourcePool
    from prefill_worker.messages import PrefillCommand
    from prefill_worker.settings import PrefillWorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec:
    """What the engine process is started with. `pair_key` is what both processes check readers' secrets with.

    `hardware` is that of several ranks where it is not what belongs to the device.
    """

    settings: PrefillWorkerSettings
    incarnation: str
    pair_key: bytes = field(repr=False)
    hardware: RankHardware | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """What the server process learns when the engine is ready. `handles` are the ways to the pool that lead here."""

    engine: EngineFacts
    handles: tuple[PoolHandle, ...]


def run_prefill_engine(channel: ChildChannel[PrefillCommand, EventBatch], spec: PrefillSpec) -> None:
    """The engine process's whole life. However it ends, the segment is unlinked, but for SIGKILL: then by the next."""
    settings = spec.settings
    setup_logging(settings.telemetry, "prefill_engine")
    num_ranks, device = settings.engine.tensor_parallel_size, settings.engine.device
    hardware = spec.hardware or ranks_on(device)
    sources: list[SourcePool] = []

    def make_memory(layout: KVLayout, num_blocks: int) -> KVMemory:
        from baton.engine.host_copy import KVMemory
        from baton.engine.kv_pool import KVPool
        from kv_transfer.source import SourcePool

        segment = SegmentSpec(
            layout=layout,
            num_blocks=num_blocks,
            num_slots=settings.limits.max_num_seqs,
            incarnation=spec.incarnation,
        )
        place = "cpu" if num_ranks > 1 else device
        source = SourcePool.create(segment, place, host_copy=settings.handover.host_copy)
        sources.append(source)
        at_end.callback(source.close)
        pool = KVPool(layout, num_blocks, storage=source.storage, shared=source.share() if num_ranks > 1 else None)
        if num_ranks > 1 and hardware.has_own_pools:
            return KVMemory(pool=None, host=pool)
        copy = source.host_copy
        return KVMemory(pool=pool, host=None if copy is None else KVPool(layout, num_blocks, storage=copy))

    with ExitStack() as at_end:
        host = RankHost(watch=channel.watch, at_end=at_end, hardware=hardware)
        needed = HostNeeds(copies_pool=settings.handover.host_copy)
        loaded = load(WorkerRole.PREFILL, settings, make_memory, host, needed=needed)
        from baton.engine.host_copy import MirrorExecutor
        from kv_transfer.source import DistPlace  # like the other imports here it brings torch, which `load` times

        (source,) = sources
        executor = loaded.executor if loaded.blocks is None else MirrorExecutor(loaded.executor, loaded.blocks)
        clock = SystemClock()
        leases = LeaseTable(source.fences, clock, lease_s=settings.lease.lease_s)
        blocks = BlockPool(loaded.facts.num_blocks, loaded.facts.layout.block_size)
        digests = PrefixDigests(blocks.block_size) if settings.prefix_cache else None
        scheduler = PrefillScheduler(blocks, settings.limits, digests)
        core = PrefillCore(scheduler, leases, clock, loaded.structures)
        place = DistPlace.beside(settings.server, settings.handover.timeout_s)
        source.start_senders(settings.handover.enabled, leases, PairSecrets(spec.pair_key), place)
        channel.ready(PrefillFacts(engine=loaded.facts, handles=source.handles))
        EngineLoop(core, executor, clock, interrupts=core).run(channel)
        leases.end_all()
