"""The decode worker's engine process: owns the model, the KV blocks and the view of its peers' pools."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import grpc

from baton.core.clock import SystemClock
from baton.core.workers import WorkerRole
from baton.engine.block_moves import Way
from baton.engine.block_pool import BlockPool
from baton.engine.host_needs import HostNeeds
from baton.engine.rank_hardware import ranks_on
from baton.rpc.channels import client_options
from baton.rpc.errors import from_call
from baton.telemetry.logging import setup_logging
from baton.worker.engine_loop import EngineLoop
from baton.worker.start_up import RankHost, load
from decode_worker.copier import ThreadCopier
from decode_worker.engine_core import DecodeCore
from decode_worker.landing import LandingCopier, MoverSwapper
from decode_worker.movers import Rooms
from decode_worker.swapper import ThreadSwapper
from kv_transfer.readers import PeerReaders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core.model import KVLayout
    from baton.engine.channel import ChildChannel
    from baton.engine.host_copy import KVMemory
    from baton.engine.rank_hardware import RankHardware
    from baton.worker.engine_loop import EventBatch
    from baton.worker.start_up import Loaded
    from decode_worker.messages import DecodeCommand
    from decode_worker.movers import Swapper
    from decode_worker.settings import DecodeWorkerSettings
    from kv_transfer.destination import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """What the engine process is started with.

    `hardware` is that of several ranks where it is not what belongs to the device.
    """

    settings: DecodeWorkerSettings
    hardware: RankHardware | None = None


def run_decode_engine(channel: ChildChannel[DecodeCommand, EventBatch], spec: DecodeSpec) -> None:
    """The engine process's whole life. Its facts are `EngineFacts`."""
    settings = spec.settings
    setup_logging(settings.telemetry, "decode_engine")

    hardware = spec.hardware or ranks_on(settings.engine.device)

    def make_memory(layout: KVLayout, num_blocks: int) -> KVMemory:
        from baton.engine.host_copy import KVMemory
        from baton.engine.kv_pool import KVPool

        if settings.engine.tensor_parallel_size == 1:
            return KVMemory(pool=KVPool(layout, num_blocks, device=settings.engine.device))
        if not hardware.has_own_pools:
            return KVMemory(pool=KVPool.in_shared_memory(layout, num_blocks))
        # What ranks swap out goes where handovers come in, behind the blocks of the pool.
        num_slots = settings.swap_bytes // layout.block_bytes
        return KVMemory(pool=None, host=KVPool.in_shared_memory(layout, num_blocks + num_slots))

    with ExitStack() as at_end:
        host = RankHost(watch=channel.watch, at_end=at_end, hardware=hardware)
        needed = HostNeeds(swap_bytes=settings.swap_bytes)
        loaded = load(WorkerRole.DECODE, settings, make_memory, host, needed=needed)
        from kv_transfer.ways import ReaderFactory  # this brings torch, which `load` times

        facts = loaded.facts
        move = _move(settings.engine.device)
        open_reader = ReaderFactory(
            channel=lambda address: grpc.insecure_channel(address, client_options(settings.server.max_message_bytes)),
            from_call=from_call,
            max_message_bytes=settings.server.max_message_bytes,
            timeout_s=settings.handover.timeout_s,
            move=move,
        )
        num_slots = settings.swap_bytes // facts.layout.block_bytes
        copier = ThreadCopier(PeerReaders(open_reader), loaded.memory.outer, channel.wake)
        at_end.callback(copier.close)
        swapper = _swapper(loaded, num_slots, move, channel.wake) if num_slots else None
        if isinstance(swapper, ThreadSwapper):
            at_end.callback(swapper.close)
        clock = SystemClock()
        rooms = Rooms(
            pool=BlockPool(facts.num_blocks, facts.layout.block_size),
            copy_blocks=_copy_blocks(loaded),
            swap=BlockPool(num_slots, facts.layout.block_size) if num_slots else None,
            swapper=swapper,
        )
        core = DecodeCore(
            rooms,
            settings.engine.max_num_seqs,
            copier if loaded.blocks is None else LandingCopier(copier, loaded.blocks),
            clock,
            loaded.structures,
        )
        channel.ready(facts)
        EngineLoop(core, loaded.executor, clock).run(channel)


def _swapper(loaded: Loaded, num_slots: int, move: Move, wake: Callable[[], None]) -> Swapper:
    """One that copies beside the steps where this process has the pool; several ranks do it between theirs."""
    if loaded.blocks is not None:
        return MoverSwapper(loaded.blocks, loaded.memory.outer.num_blocks - num_slots)
    from kv_transfer.swap import SwapSpace

    return ThreadSwapper(SwapSpace(loaded.memory.outer, num_slots, move), wake)


def _copy_blocks(loaded: Loaded) -> Callable[[Sequence[int], Sequence[int]], None]:
    """For `Rooms`."""
    if loaded.blocks is not None:
        return partial(loaded.blocks.move, Way.WITHIN)
    return loaded.memory.outer.copy_blocks


def _move(device: str) -> Move:
    """How whole blocks are copied from CPU memory to CPU memory."""
    from baton.engine.native.build import build, compiler
    from baton.engine.native.move import NativeMove

    # That there is no compiler was told when the model was loaded.
    library = build() if device == "cpu" and compiler() is not None else None
    return ctypes.memmove if library is None else NativeMove(library)
