"""Finds workers for the heads of the classes: Python chooses the pair, a script commits it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.coordination.wire import decode_grant, decode_snapshot
from baton.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from baton.coordination.commands import Commands
    from baton.coordination.limits import QueueConfig
    from baton.coordination.wire import GrantMessage, Head, Snapshot
    from baton.core.workers import Route, Ticket, WorkerView

# How often one head is tried in one round when another gateway takes the credit that the snapshot showed.
_TRIES = 3
# How full workers may be until a stuck head finds a pair that is to be kept: the pair with the least to wait for.
_SHARES = (0.75, 0.5, 0.25, 0.0)


class Dispatcher:
    """Grants one head after the other, of any gateway, until no head finds workers. One at a time per gateway."""

    def __init__(
        self,
        commands: Commands,
        channel_prefix: str,
        route: Callable[[Ticket, Sequence[WorkerView]], Route | None],
        config: QueueConfig,
    ) -> None:
        self._commands = commands
        self._channel_prefix = channel_prefix
        self._route = route
        self._config = config
        self._snapshot: Snapshot | None = None
        self._must_peek = False
        self._wake = asyncio.Event()

    def offer(self, snapshot: Snapshot | None) -> None:
        """Starts a round on a fresh snapshot; nothing to do for None or one without heads."""
        if snapshot is None or not snapshot.heads:
            return
        if self._snapshot is None or snapshot.taken_us > self._snapshot.taken_us:
            self._snapshot = snapshot
        self._wake.set()

    async def run(
        self, peek: Callable[[], Awaitable[Snapshot | None]], deliver: Callable[[GrantMessage], None]
    ) -> None:
        """Dispatches until cancelled. `peek` gets a snapshot after `wake`, `deliver` takes each grant."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            snapshot, self._snapshot = self._snapshot, None
            if self._must_peek:
                snapshot, self._must_peek = None, False
            try:
                await self._round(snapshot or await peek(), deliver)
            except UnavailableError:
                continue  # the next tick begins a new round when Redis is back

    def wake(self) -> None:
        """Starts a round that looks first: something became free after any snapshot at hand."""
        self._must_peek = True
        self._wake.set()

    async def _round(self, snapshot: Snapshot | None, deliver: Callable[[GrantMessage], None]) -> None:
        tries: Counter[str] = Counter()
        while snapshot is not None:
            choice = self._choose(snapshot, tries)
            if choice is None:
                await self._reserve(snapshot)
                return
            head, route = choice
            status, rest, *message = await self._grant(head.ticket, route)
            if status == "settling":
                return
            if status == "granted":
                deliver(decode_grant(message[0]))
            else:
                tries[head.ticket.attempt_id] += 1
            snapshot = decode_snapshot(rest)

    def _choose(self, snapshot: Snapshot, tries: Counter[str]) -> tuple[Head, Route] | None:
        """The first head in turn for which there are workers. A head without never holds up another class."""
        kept = snapshot.reservation
        others_views = snapshot.views if kept is None else kept.hide_from(snapshot.views)
        for head in sorted(snapshot.heads, key=lambda head: (head.turn, head.order)):
            if tries[head.ticket.attempt_id] >= _TRIES or not self._may_run(head):
                continue
            is_kept_for = kept is not None and kept.attempt_id == head.ticket.attempt_id
            route = self._route(head.ticket, snapshot.views if is_kept_for else others_views)
            if route is not None:
                return head, route
        return None

    def _may_run(self, head: Head) -> bool:
        limits = self._config.classes.get(head.ticket.queue_class)
        # A class of another gateway's configuration only: that gateway knows its limits.
        return limits is not None and (limits.max_prefills is None or head.num_prefills < limits.max_prefills)

    async def _reserve(self, snapshot: Snapshot) -> None:
        """Has credit kept for the head that has been without workers for longest, and too long."""
        stuck = [head for head in snapshot.heads if head.standstill_s >= self._config.reserve_after_s]
        stuck = [head for head in stuck if self._may_run(head)]
        if not stuck or snapshot.reservation is not None:
            return
        head = max(stuck, key=lambda head: head.standstill_s)
        for share in _SHARES:
            route = self._route(head.ticket, [_relieved(view, share) for view in snapshot.views])
            if route is not None:
                least_ms = round(self._config.reserve_after_s * 1000)
                await self._commands.call("reserve", *self._args(head.ticket, route), least_ms)
                return

    async def _grant(self, ticket: Ticket, route: Route) -> list[str]:
        limits = self._config.classes[ticket.queue_class]
        reply: list[str] = await self._commands.call(
            "grant",
            *self._args(ticket, route),
            -1 if limits.max_prefills is None else limits.max_prefills,
            limits.weight,
            round(self._config.settle_s * 1000),
            self._config.gateway_id,
            self._channel_prefix,
        )
        return reply

    def _args(self, ticket: Ticket, route: Route) -> tuple[str | int, ...]:
        return ticket.attempt_id, route.prefill_id, route.decode_id, route.prefill_blocks, route.decode_blocks


def _relieved(view: WorkerView, share: float) -> WorkerView:
    """The worker with only so much of what is granted on it now."""
    return replace(view, granted_blocks=int(view.granted_blocks * share), granted_seqs=int(view.granted_seqs * share))
