"""The server process's view of the leases that its engine has granted (a `LeaseHolder`).

The engine may be in the middle of a long step, and a reader's renewal must not wait for it. So calls are answered
from here, and the engine, which applies them before it looks for leases that ran out, has the last word: a renewal
that crosses its lease's end is answered with a yes, and the reader finds the fence gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.errors import LeaseNotFoundError
from prefill_worker.messages import PromptDone, Released, ReleaseLease, RenewLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.engine_loop import EventBatch
    from kv_transfer.lease import LeaseOutcome
    from prefill_worker.messages import PrefillCommand


class LiveLeases:
    """Knows a lease from the event that granted it to the event that ended it."""

    def __init__(self, send: Callable[[PrefillCommand], None], lease_s: float, instruments: WorkerInstruments) -> None:
        self._send = send
        self._lease_s = lease_s
        self._instruments = instruments
        self._lease_of: dict[str, str] = {}  # attempt id -> lease id
        self._live: set[str] = set()

    def observe(self, batch: EventBatch) -> None:
        """Follows the engine's events."""
        for event in batch.events:
            if isinstance(event, PromptDone) and event.cache is not None:
                self._lease_of[event.attempt_id] = event.cache.lease_id
                self._live.add(event.cache.lease_id)
            elif isinstance(event, Released) and event.outcome is not None:
                self._instruments.leases.labels(event.outcome.value).inc()
                self._live.discard(self._lease_of.pop(event.attempt_id))

    async def renew_lease(self, lease_id: str) -> float:
        """Passes a renewal on; LeaseNotFoundError when the lease is known to have ended."""
        if lease_id not in self._live:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        self._send(RenewLease(lease_id=lease_id))
        return self._lease_s

    async def release_lease(self, lease_id: str, outcome: LeaseOutcome) -> None:
        """Passes a release on. Nothing to do when the lease has ended."""
        if lease_id in self._live:
            self._send(ReleaseLease(lease_id=lease_id, outcome=outcome))
