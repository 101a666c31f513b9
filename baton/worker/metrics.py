"""What every batch of an engine says about the worker's load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import OutOfMemoryError

if TYPE_CHECKING:
    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.engine_loop import EventBatch


class LoadMetrics:
    """Keeps occupancy and step metrics up to date."""

    def __init__(self, instruments: WorkerInstruments, num_blocks: int) -> None:
        self._instruments = instruments
        self._num_blocks = num_blocks

    def observe(self, batch: EventBatch) -> None:
        """Takes one batch in."""
        self._instruments.num_requests_running.set(batch.stats.num_running)
        self._instruments.num_requests_waiting.set(batch.stats.num_waiting)
        self._instruments.kv_cache_usage.set(batch.stats.num_used_blocks / self._num_blocks)
        if batch.step is not None:
            self._instruments.step_time.observe(batch.step.step_s)
            self._instruments.step_tokens.observe(batch.step.num_tokens)
        for event in batch.events:
            if event.is_last and isinstance(getattr(event, "error", None), OutOfMemoryError):
                self._instruments.out_of_memory.inc()
