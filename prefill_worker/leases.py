"""The server process's view of the leases that its engine has granted (a `LeaseHolder`).

The engine may be in the middle of a long step, and a reader's renewal must not wait for it. So calls are answered
from here, and the engine, which applies them before it looks for leases that ran out, has the last word: a renewal
that crosses its lease's end is answered with a yes, and the reader finds the fence gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.worker.messages import Failed
from kv_transfer.descriptor import Growth
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.lease import LeaseOutcome
from prefill_worker.messages import CacheGrown, PromptDone, Released, ReleaseLease, RenewLease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.engine_loop import EventBatch
    from prefill_worker.messages import HeldCache, PrefillCommand


class LiveLeases:
    """Knows a lease from the event that granted it to the event that ended it."""

    def __init__(self, send: Callable[[PrefillCommand], None], lease_s: float, instruments: WorkerInstruments) -> None:
        self._send = send
        self._lease_s = lease_s
        self._instruments = instruments
        self._lease_of: dict[str, str] = {}  # attempt id -> lease id
        self._live: dict[str, _Live] = {}

    def observe(self, batch: EventBatch) -> None:
        """Follows the engine's events."""
        for event in batch.events:
            if isinstance(event, CacheGrown):
                self._grow(event.attempt_id, event.cache, ())
            elif isinstance(event, PromptDone) and event.cache is not None:
                first_token_ids = tuple(each.token_id for each in event.first_tokens)
                self._grow(event.attempt_id, event.cache, first_token_ids)
            elif isinstance(event, Released | Failed):
                self._forget(event)

    async def renew_lease(self, lease_id: str, pair: str) -> float:
        """Passes a renewal on; LeaseNotFoundError when the lease is known to have ended or is another pair's."""
        self._find(lease_id, pair)
        self._send(RenewLease(lease_id=lease_id))
        return self._lease_s

    async def release_lease(self, lease_id: str, pair: str, outcome: LeaseOutcome) -> None:
        """Passes a release on. Nothing to do when the lease has ended or is another pair's."""
        with contextlib.suppress(LeaseNotFoundError):
            self._find(lease_id, pair)
            self._send(ReleaseLease(lease_id=lease_id, outcome=outcome))

    def leased_blocks(self, lease_id: str, pair: str) -> HeldCache:
        """What the lease lets its pair read; LeaseNotFoundError when it is known to have ended or is another's."""
        return self._find(lease_id, pair).cache

    async def follow_lease(self, lease_id: str, pair: str) -> AsyncIterator[Growth]:
        """What its pair may read, from the first block on, until the cache is complete.

        LeaseNotFoundError when the lease ends before that, or is another's.
        """
        num_told = 0
        while True:
            live = self._find(lease_id, pair)
            # All of one moment: it goes on while the follower is told.
            news, more, first_token_ids = live.news, live.cache.block_ids[num_told:], live.first_token_ids
            if more or first_token_ids:
                yield Growth(more, first_token_ids)
                num_told += len(more)
            if first_token_ids:
                return
            await news.wait()

    def _find(self, lease_id: str, pair: str) -> _Live:
        live = self._live.get(lease_id)
        if live is not None and live.pair is None:
            live.pair = pair  # the first that names it
        if live is None or live.pair != pair:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        return live

    def _grow(self, attempt_id: str, cache: HeldCache, first_token_ids: tuple[int, ...]) -> None:
        self._lease_of[attempt_id] = cache.lease_id
        live = self._live.setdefault(cache.lease_id, _Live(cache=cache))
        live.cache, live.first_token_ids = cache, first_token_ids
        live.tell()

    def _forget(self, event: Released | Failed) -> None:
        lease_id = self._lease_of.pop(event.attempt_id, None)
        if lease_id is not None:
            outcome = event.outcome if isinstance(event, Released) else None
            self._instruments.leases.labels((outcome or LeaseOutcome.ABANDONED).value).inc()
            self._live.pop(lease_id).tell()


@dataclass(slots=True, kw_only=True)
class _Live:
    """`news` is set, and replaced, at each change. `pair`: whose the lease is, once somebody has named it."""

    cache: HeldCache
    first_token_ids: tuple[int, ...] = ()
    pair: str | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()
