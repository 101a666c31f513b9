"""A worker as it describes itself: to the registry, and to whoever asks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.workers import WorkerRecord, WorkerRole, WorkerState
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.worker.engine_loop import EngineStats
    from baton.worker.start_up import EngineFacts

_ROLES = {
    WorkerRole.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: common_pb2.WORKER_ROLE_DECODE,
}
_STATES = {
    WorkerState.READY: common_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: common_pb2.WORKER_STATE_DRAINING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What does not change in one life of a worker. `address` answers once the server has started."""

    worker_id: str
    incarnation: str
    role: WorkerRole
    address: Callable[[], str]
    host_id: str
    max_num_seqs: int
    facts: EngineFacts
    converts_dtype: bool = False
    caches_prefixes: bool = False

    def record(self, state: WorkerState, stats: EngineStats) -> WorkerRecord:
        """The heartbeat's content."""
        return WorkerRecord(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            state=state,
            address=self.address(),
            host_id=self.host_id,
            fingerprint=self.facts.fingerprint,
            block_size=self.facts.layout.block_size,
            num_blocks=self.facts.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_context_tokens=self.facts.max_context_tokens,
            converts_dtype=self.converts_dtype,
            caches_prefixes=self.caches_prefixes,
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_used_blocks=stats.num_used_blocks,
            device=self.facts.device,
            attention=self.facts.attention,
        )

    def status(self, state: WorkerState, stats: EngineStats) -> common_pb2.WorkerStatus:
        """The answer to a status call."""
        fingerprint = self.facts.fingerprint
        return common_pb2.WorkerStatus(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=_ROLES[self.role],
            state=_STATES[state],
            address=self.address(),
            fingerprint=common_pb2.ModelFingerprint(
                model=fingerprint.model,
                weights=fingerprint.weights,
                tokenizer=fingerprint.tokenizer,
                dtype=fingerprint.dtype,
                quantization=fingerprint.quantization,
            ),
            num_waiting=stats.num_waiting,
            num_running=stats.num_running,
            num_used_blocks=stats.num_used_blocks,
            num_blocks=self.facts.num_blocks,
            block_size_tokens=self.facts.layout.block_size,
            device=self.facts.device,
            attention=self.facts.attention,
        )
