"""What every batch of an engine says about the worker's load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import OutOfMemoryError
from baton.worker.engine_loop import Preemptions

if TYPE_CHECKING:
    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.engine_loop import EventBatch
    from baton.worker.start_up import EngineFacts


class LoadMetrics:
    """Keeps occupancy and step metrics up to date."""

    @classmethod
    def of(cls, instruments: WorkerInstruments, facts: EngineFacts) -> LoadMetrics:
        """Those of a ready engine, which tell what it computes with."""
        model = facts.fingerprint
        instruments.engine.labels(facts.device, model.dtype, model.quantization, facts.attention).set(1)
        return cls(instruments, facts.num_blocks)

    def __init__(self, instruments: WorkerInstruments, num_blocks: int) -> None:
        self._instruments = instruments
        self._num_blocks = num_blocks
        self._preemptions = Preemptions()

    def observe(self, batch: EventBatch) -> None:
        """Takes one batch in."""
        self._instruments.num_requests_running.set(batch.stats.num_running)
        self._instruments.num_requests_waiting.set(batch.stats.num_waiting)
        self._instruments.kv_cache_usage.set(batch.stats.num_used_blocks / self._num_blocks)
        if batch.step is not None:
            self._instruments.step_time.observe(batch.step.step_s)
            self._instruments.step_tokens.observe(batch.step.num_tokens)
        self._observe_preemptions(batch.stats.preemptions)
        for event in batch.events:
            if event.is_last and isinstance(getattr(event, "error", None), OutOfMemoryError):
                self._instruments.out_of_memory.inc()

    def _observe_preemptions(self, now: Preemptions) -> None:
        before, self._preemptions = self._preemptions, now
        if now == before:
            return
        instruments = self._instruments
        instruments.preemptions.labels("swap").inc(now.num_swapped - before.num_swapped)
        instruments.preemptions.labels("shed").inc(now.num_shed - before.num_shed)
        instruments.swapped_blocks.labels("out").inc(now.blocks_out - before.blocks_out)
        instruments.swapped_blocks.labels("in").inc(now.blocks_in - before.blocks_in)
        instruments.num_requests_swapped.set(now.num_away)
