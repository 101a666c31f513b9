"""The server process's view of the leases that its engine has granted (a `LeaseHolder`).

The engine may be in the middle of a long step, and a reader's renewal must not wait for it. So calls are answered
from here, and the engine, which applies them before it looks for leases that ran out, has the last word: a renewal
that crosses its lease's end is answered with a yes, and the reader finds the fence gone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kv_transfer.errors import LeaseNotFoundError
from prefill_worker.messages import PromptDone, Released, ReleaseLease, RenewLease

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.engine_loop import EventBatch
    from kv_transfer.lease import LeaseOutcome
    from prefill_worker.messages import HeldCache, PrefillCommand


class LiveLeases:
    """Knows a lease from the event that granted it to the event that ended it."""

    def __init__(self, send: Callable[[PrefillCommand], None], lease_s: float, instruments: WorkerInstruments) -> None:
        self._send = send
        self._lease_s = lease_s
        self._instruments = instruments
        self._lease_of: dict[str, str] = {}  # attempt id -> lease id
        self._live: dict[str, HeldCache] = {}
        self._pair_of: dict[str, str] = {}  # lease id -> the first pair that named it

    def observe(self, batch: EventBatch) -> None:
        """Follows the engine's events."""
        for event in batch.events:
            if isinstance(event, PromptDone) and event.cache is not None:
                self._lease_of[event.attempt_id] = event.cache.lease_id
                self._live[event.cache.lease_id] = event.cache
            elif isinstance(event, Released) and event.outcome is not None:
                self._instruments.leases.labels(event.outcome.value).inc()
                lease_id = self._lease_of.pop(event.attempt_id)
                self._live.pop(lease_id, None)
                self._pair_of.pop(lease_id, None)

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        """Passes a renewal on; LeaseNotFoundError when the lease is known to have ended or is another pair's."""
        self.leased_blocks(lease_id, pair)
        self._send(RenewLease(lease_id=lease_id))
        return self._lease_s

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        """Passes a release on. Nothing to do when the lease has ended or is another pair's."""
        with contextlib.suppress(LeaseNotFoundError):
            self.leased_blocks(lease_id, pair)
            self._send(ReleaseLease(lease_id=lease_id, outcome=outcome))

    def leased_blocks(self, lease_id: str, pair: str) -> HeldCache:
        """What the lease lets its pair read; LeaseNotFoundError when it is known to have ended or is another's."""
        cache = self._live.get(lease_id)
        if cache is None or self._pair_of.setdefault(lease_id, pair) != pair:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        return cache
