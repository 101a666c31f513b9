"""Finds workers for the heads of the classes: the policy chooses a pair, a script commits it."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from baton.coordination.policy import Policy
from baton.coordination.wire import decode_grant, decode_snapshot
from baton.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from baton.coordination.commands import Commands
    from baton.coordination.limits import QueueConfig
    from baton.coordination.wire import GrantMessage, Snapshot
    from baton.core.workers import Route, Ticket, WorkerView


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
        self._policy = Policy(route, config)
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
            choice = self._policy.choose(snapshot, tries)
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

    async def _reserve(self, snapshot: Snapshot) -> None:
        """Has credit kept for a head that is stuck."""
        choice = self._policy.reserve(snapshot)
        if choice is not None:
            head, route = choice
            least_ms = round(self._config.reserve_after_s * 1000)
            await self._commands.call("reserve", *self._args(head.ticket, route), least_ms)

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
            route.prefill_tokens,
        )
        return reply

    def _args(self, ticket: Ticket, route: Route) -> tuple[str | int, ...]:
        return ticket.attempt_id, route.prefill_id, route.decode_id, route.prefill_blocks, route.decode_blocks
