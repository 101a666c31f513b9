"""The decode worker's engine process: owns the model, the KV blocks and the view of its peers' pools."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from baton.core.clock import SystemClock
from baton.core.workers import WorkerRole
from baton.engine.block_pool import BlockPool
from baton.rpc.channels import client_options
from baton.rpc.errors import from_call
from baton.telemetry.logging import setup_logging
from baton.worker.engine_loop import EngineLoop
from baton.worker.start_up import RankHost, load
from decode_worker.copier import ThreadCopier
from decode_worker.engine_core import DecodeCore
from decode_worker.movers import Rooms
from decode_worker.swapper import ThreadSwapper
from kv_transfer.readers import PeerReaders

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.channel import ChildChannel
    from baton.engine.kv_pool import KVPool
    from baton.worker.engine_loop import EventBatch
    from decode_worker.messages import DecodeCommand
    from decode_worker.settings import DecodeWorkerSettings
    from kv_transfer.destination import Move


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """What the engine process is started with."""

    settings: DecodeWorkerSettings


def run_decode_engine(channel: ChildChannel[DecodeCommand, EventBatch], spec: DecodeSpec) -> None:
    """The engine process's whole life. Its facts are `EngineFacts`."""
    settings = spec.settings
    setup_logging(settings.telemetry, "decode_engine")

    def make_pool(layout: KVLayout, num_blocks: int) -> KVPool:
        from baton.engine.kv_pool import KVPool

        if settings.engine.tensor_parallel_size > 1:
            return KVPool.in_shared_memory(layout, num_blocks)
        return KVPool(layout, num_blocks, device=settings.engine.device)

    with ExitStack() as at_end:
        host = RankHost(watch=channel.watch, at_end=at_end)
        loaded = load(WorkerRole.DECODE, settings, make_pool, host, swap_bytes=settings.swap_bytes)
        from kv_transfer.swap import SwapSpace  # these bring torch, which `load` times
        from kv_transfer.ways import ReaderFactory

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
        swapper = ThreadSwapper(SwapSpace(loaded.pool, num_slots, move), channel.wake) if num_slots else None
        if swapper is not None:
            at_end.callback(swapper.close)
        copier = ThreadCopier(PeerReaders(open_reader), loaded.pool, channel.wake)
        at_end.callback(copier.close)
        clock = SystemClock()
        rooms = Rooms(
            pool=BlockPool(facts.num_blocks, facts.layout.block_size),
            copy_blocks=loaded.pool.copy_blocks,
            swap=BlockPool(num_slots, facts.layout.block_size) if num_slots else None,
            swapper=swapper,
        )
        core = DecodeCore(
            rooms,
            settings.engine.max_num_seqs,
            copier,
            clock,
            loaded.structures,
        )
        channel.ready(facts)
        EngineLoop(core, loaded.executor, clock).run(channel)


def _move(device: str) -> Move:
    """How whole blocks are copied from CPU memory to CPU memory."""
    from baton.engine.native.build import build, compiler
    from baton.engine.native.move import NativeMove

    # That there is no compiler was told when the model was loaded.
    library = build() if device == "cpu" and compiler() is not None else None
    return ctypes.memmove if library is None else NativeMove(library)
