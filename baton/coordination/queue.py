"""The admission queue, as a gateway uses it.

All gateways of a model share one queue in Redis. Scripts commit each step atomically and check every limit; which
pair of workers serves a ticket is chosen by the `route` function that the gateway passes in.

A ticket waits in its class, is granted a pair of workers, and ends. Whatever it holds, it holds under a lease that its
gateway renews: when the gateway dies, any other one ends the lease. What Redis loses, `run` puts back.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from baton.coordination.commands import Commands
from baton.coordination.dispatch import Dispatcher
from baton.coordination.limits import ClassStatus
from baton.coordination.owned import OwnedTasks
from baton.coordination.place import Place
from baton.coordination.refusals import already_exists, full, redis_away, shutting_down, too_late
from baton.coordination.upkeep import Upkeep
from baton.coordination.wire import decode_snapshot, decode_views, encode_ticket
from baton.core.errors import AlreadyExistsError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.coordination.client import RedisConnection
    from baton.coordination.keys import Keys
    from baton.coordination.limits import QueueConfig
    from baton.core.workers import Route, Ticket, WorkerView


class AdmissionQueue:
    """One gateway's side of the queue. `run` must run for as long as it is used."""

    def __init__(
        self,
        connection: RedisConnection,
        keys: Keys,
        route: Callable[[Ticket, Sequence[WorkerView]], Route | None],
        config: QueueConfig,
    ) -> None:
        """`route` is synchronous and pure: the pair that serves the ticket, None when none has credit now."""
        self._connection = connection
        self._keys = keys
        self._config = config
        self._commands = Commands(connection, keys, timeout_s=config.call_timeout_s)
        self._tasks = OwnedTasks()
        self._dispatcher = Dispatcher(self._commands, keys.gateway_channel(""), route, config)
        self._upkeep = Upkeep(self._commands, self._dispatcher, self._tasks, config)
        self._request_ids: set[str] = set()

    @property
    def is_available(self) -> bool:
        """Whether `run` runs and Redis answered last; while it is away, it is asked again each `tick_s`."""
        return self._tasks.is_open and self._commands.is_available

    @property
    def num_live(self) -> int:
        """Tickets of this gateway that have not ended."""
        return len(self._upkeep.places)

    @property
    def views(self) -> Sequence[WorkerView]:
        """The live workers as last seen: not older than about `tick_s` while Redis answers."""
        return self._upkeep.views

    async def workers(self) -> Sequence[WorkerView]:
        """The live workers now. UnavailableError when Redis is away."""
        return decode_views(await self._commands.call("workers"))

    async def status(self) -> list[ClassStatus]:
        """All classes of this gateway's configuration, over all gateways. UnavailableError when Redis is away."""
        rows = await self._commands.call("status", *self._config.classes)
        return [
            ClassStatus(
                name=name,
                num_waiting=waiting,
                waiting_tokens=tokens,
                num_prefills=prefills,
                oldest_wait_s=oldest_ms / 1000,
                limits=limits,
            )
            for (name, limits), (waiting, tokens, prefills, oldest_ms) in zip(
                self._config.classes.items(), rows, strict=True
            )
        ]

    async def check_integrity(self) -> list[str]:
        """Counts all credits and tickets in Redis again: one line for each that differs, none when all is right.

        Reads everything: for tests and for people, not for each request. UnavailableError when Redis is away.
        """
        faults: list[str] = await self._commands.call("audit")
        return faults

    def admit(self, ticket: Ticket) -> Place:
        """`async with queue.admit(ticket) as place:` admits the ticket; leaving the block gives everything back.

        Entering raises ResourceExhaustedError with `retry_after_s` when the class is full or the ticket would wait
        longer than it can, AlreadyExistsError when the request id is live, and UnavailableError within
        `call_timeout_s` when Redis is away. After a loss it waits for up to `settle_s`, until Redis knows again which
        request ids live.
        """
        assert ticket.queue_class in self._config.classes, f"unknown class {ticket.queue_class}"
        return Place(ticket, self)

    def readmit(self, former: Place, ticket: Ticket) -> Place:
        """As `admit`, for a new attempt at the request of a place that was granted in vain.

        Entering ends the former place, in one step with the admission, and takes over its order: before all who came
        later, and whatever the limits of the class. Raises UnavailableError when Redis is away; the former place is
        then as it was, or ended.
        """
        assert ticket.request_id == former.ticket.request_id, "an attempt at the same request"
        assert ticket.queue_class == former.ticket.queue_class, "in the same class"
        return Place(ticket, self, former)

    async def run(self) -> None:
        """Dispatches, renews and puts back until cancelled; then gives back all that this gateway holds."""
        upkeep = self._upkeep
        try:
            async with self._tasks.open() as tasks:
                tasks.create_task(upkeep.listen(self._connection, self._keys))
                tasks.create_task(self._dispatcher.run(upkeep.peek, upkeep.deliver))
                tasks.create_task(upkeep.tick_forever())
        finally:
            attempts = [attempt for attempt, place in upkeep.places.items() if place.is_admitted]
            for place in upkeep.places.values():
                place.fail(shutting_down())
            await upkeep.release(*attempts)

    # --- the side of the places -------------------------------------------------------------------------------

    async def enter(self, place: Place) -> None:
        """Admits a place's ticket; see `admit`."""
        ticket = place.ticket
        if not self.is_available:
            raise redis_away()
        if place.former is not None:
            self._forget(place.former)
        if ticket.request_id in self._request_ids:
            raise already_exists(ticket)
        # Known before Redis knows it: another gateway's grant can arrive before the answer.
        self._upkeep.places[ticket.attempt_id] = place
        self._request_ids.add(ticket.request_id)
        try:
            await self._admit_when_settled(place)
        except (ResourceExhaustedError, AlreadyExistsError):
            self._forget(place)
            raise
        except UnavailableError:
            # No answer in time: the ticket may get into the queue all the same.
            self._forget(place)
            self._tasks.start(self._upkeep.release(*place.attempt_ids))
            raise
        except asyncio.CancelledError:
            await self.leave(place)
            raise

    async def leave(self, place: Place) -> None:
        """Gives back all that a place's ticket holds."""
        if not place.has_ended:
            self._forget(place)
            with suppress(UnavailableError):  # `run` has given it back already, or its lease will
                await self._tasks.finish(self._upkeep.release(*place.attempt_ids))

    async def end_prefill(self, place: Place) -> None:
        """Gives back what a place's ticket holds of its prefill worker."""
        with suppress(UnavailableError):
            await self._tasks.finish(self._upkeep.pay_prefills([place]))

    def _forget(self, place: Place) -> None:
        place.has_ended = True
        self._upkeep.places.pop(place.ticket.attempt_id, None)
        self._request_ids.discard(place.ticket.request_id)

    async def _admit_when_settled(self, place: Place) -> None:
        while True:
            settling_s = await self._tasks.finish(self._admit(place))
            if settling_s == 0:
                return
            await asyncio.sleep(settling_s)

    async def _admit(self, place: Place) -> float:
        """Admits, or returns the seconds after which to ask again."""
        ticket, limits = place.ticket, self._config.classes[place.ticket.queue_class]
        reply = await self._commands.call(*self._admission(place))
        match reply[0]:
            case "exists":
                raise already_exists(ticket)
            case "full":
                raise full(ticket, limits, reply)
            case "late":
                raise too_late(ticket, reply[1])
            case "settling":
                return reply[1] / 1000  # type: ignore[no-any-return]
        _, place.position, order, since, wait_ms, snapshot = reply
        place.order, place.since_ms, place.is_admitted = int(order), int(since), True
        place.predicted_wait_s = wait_ms / 1000 if wait_ms >= 0 else None
        self._upkeep.see(decode_snapshot(snapshot))
        if place.has_ended:  # its request was cancelled, twice, while Redis answered
            self._tasks.start(self._upkeep.release(ticket.attempt_id))
        return 0.0

    def _admission(self, place: Place) -> tuple[str, *tuple[str | int, ...]]:
        """The script that admits the place, with its arguments."""
        ticket, limits = place.ticket, self._config.classes[place.ticket.queue_class]
        fields = encode_ticket(ticket, self._config.gateway_id)
        if place.former is not None:
            fields["order"] = place.former.order
            return (
                "readmit",
                place.former.ticket.attempt_id,
                ticket.attempt_id,
                json.dumps(fields),
                self._config.lease_ms,
            )
        return (
            "admit",
            ticket.attempt_id,
            json.dumps(fields),
            self._config.lease_ms,
            limits.max_waiting,
            limits.max_waiting_tokens,
            round(self._config.settle_s * 1000),
        )
