"""The admission queue, as a gateway uses it.

All gateways of a model share one queue in Redis. Scripts commit each step atomically and check every limit; which
pair of workers serves a ticket is chosen by the `route` function that the gateway passes in.

A ticket waits in its class, is granted a pair of workers, and ends. Whatever it holds, it holds under a lease that its
gateway renews: when the gateway dies, any other one ends the lease. What Redis loses, `run` puts back.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from baton.coordination.commands import Commands, no_lost_cancel
from baton.coordination.dispatch import Dispatcher
from baton.coordination.place import Place
from baton.coordination.wire import decode_grant, decode_snapshot, decode_views, encode_ticket
from baton.core.errors import AlreadyExistsError, ResourceExhaustedError, ServingError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from baton.coordination.client import RedisConnection
    from baton.coordination.keys import Keys
    from baton.coordination.wire import GrantMessage, Snapshot
    from baton.core.workers import Route, Ticket, WorkerView

# Tickets in one call of a script, so that none holds up Redis for more than a few milliseconds.
_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLimits:
    """One class of requests. `max_prefills` bounds its prefills that run at once, over all gateways; None: no bound.

    Classes take turns at free credit in the ratio of their `weight`.
    """

    max_waiting: int
    max_waiting_tokens: int
    max_prefills: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class's queue at a moment, over all gateways."""

    name: str
    num_waiting: int
    waiting_tokens: int
    num_prefills: int
    oldest_wait_s: float
    limits: ClassLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """One gateway's side of the queue.

    `gateway_id` is unique to the process. A ticket ends `lease_s` after its gateway's last renewal, one each `tick_s`;
    no call waits longer than `call_timeout_s`; a new or lost database grants nothing for `settle_s`, in which all
    gateways put back what they run. Class names contain neither '|' nor '}'.
    """

    gateway_id: str
    classes: Mapping[str, ClassLimits]
    lease_s: float = 5.0
    tick_s: float = 0.5
    call_timeout_s: float = 1.0
    settle_s: float = 1.5


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
        self._commands = Commands(connection, keys, timeout_s=config.call_timeout_s)
        self._subscriber = connection.subscriber
        self._wake_channel = keys.wake_channel
        self._own_channel = keys.gateway_channel(config.gateway_id)
        self._config = config
        self._dispatcher = Dispatcher(self._commands, keys.gateway_channel(""), route, config)
        self._places: dict[str, Place] = {}
        self._request_ids: set[str] = set()
        self._views: tuple[WorkerView, ...] = ()
        self._tasks: asyncio.TaskGroup | None = None
        self._tick_now = asyncio.Event()

    @property
    def is_available(self) -> bool:
        """Whether `run` runs and Redis answered last; while it is away, it is asked again each `tick_s`."""
        return self._tasks is not None and self._commands.is_available

    @property
    def num_live(self) -> int:
        """Tickets of this gateway that have not ended."""
        return len(self._places)

    @property
    def views(self) -> Sequence[WorkerView]:
        """The live workers as last seen: not older than about `tick_s` while Redis answers."""
        return self._views

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

        Entering raises ResourceExhaustedError with `retry_after_s` when the class is full, AlreadyExistsError when the
        request id is live, and UnavailableError within `call_timeout_s` when Redis is away.
        """
        assert ticket.queue_class in self._config.classes, f"unknown class {ticket.queue_class}"
        return Place(ticket, self)

    async def run(self) -> None:
        """Dispatches, renews and puts back until cancelled; then gives back all that this gateway holds."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._listen())
                tasks.create_task(self._dispatcher.run(self._peek, self._deliver))
                tasks.create_task(self._tick_forever())
        finally:
            self._tasks = None
            attempts = [attempt for attempt, place in self._places.items() if place.is_admitted]
            for place in self._places.values():
                place.fail(_shutting_down())
            with suppress(UnavailableError):  # the leases do the same, later
                for first in range(0, len(attempts), _BATCH):
                    await self._commands.call("release", "all", *attempts[first : first + _BATCH])

    # --- the side of the places -------------------------------------------------------------------------------

    async def enter(self, place: Place) -> None:
        """Admits a place's ticket; see `admit`."""
        ticket = place.ticket
        if not self.is_available:
            raise UnavailableError("Redis is away; try again", reason="REDIS_UNAVAILABLE")
        if ticket.request_id in self._request_ids:
            raise _already_exists(ticket)
        # Known before Redis knows it: another gateway's grant can arrive before the answer.
        self._places[ticket.attempt_id] = place
        self._request_ids.add(ticket.request_id)
        try:
            await self._owned(self._admit(place))
        except (ResourceExhaustedError, AlreadyExistsError):
            self._forget(place)
            raise
        except UnavailableError:
            # No answer in time: the ticket may get into the queue all the same.
            self._forget(place)
            self._start(self._release("all", ticket.attempt_id))
            raise
        except asyncio.CancelledError:
            await self.leave(place)
            raise

    async def leave(self, place: Place) -> None:
        """Gives back all that a place's ticket holds."""
        if not place.has_ended:
            self._forget(place)
            with suppress(UnavailableError):  # `run` has given it back already, or its lease will
                await self._owned(self._release("all", place.ticket.attempt_id))

    async def end_prefill(self, place: Place) -> None:
        """Gives back what a place's ticket holds of its prefill worker."""
        with suppress(UnavailableError):
            await self._owned(self._pay_prefills([place]))

    def _forget(self, place: Place) -> None:
        place.has_ended = True
        self._places.pop(place.ticket.attempt_id, None)
        self._request_ids.discard(place.ticket.request_id)

    async def _admit(self, place: Place) -> None:
        ticket, limits = place.ticket, self._config.classes[place.ticket.queue_class]
        reply = await self._commands.call(
            "admit",
            ticket.attempt_id,
            json.dumps(encode_ticket(ticket, self._config.gateway_id)),
            self._lease_ms,
            limits.max_waiting,
            limits.max_waiting_tokens,
        )
        if reply[0] == "exists":
            raise _already_exists(ticket)
        if reply[0] == "full":
            raise _full(ticket, limits, reply)
        _, place.position, order, since, snapshot = reply
        place.order, place.since_ms, place.is_admitted = int(order), int(since), True
        self._see(decode_snapshot(snapshot))
        if place.has_ended:  # its request was cancelled, twice, while Redis answered
            self._start(self._release("all", ticket.attempt_id))

    async def _release(self, what: str, *attempts: str) -> None:
        with suppress(UnavailableError):  # the lease does the same, later
            self._see(decode_snapshot(await self._commands.call("release", what, *attempts)))

    async def _pay_prefills(self, places: Sequence[Place]) -> None:
        with suppress(UnavailableError):  # the next tick tries again
            attempts = [place.ticket.attempt_id for place in places]
            self._see(decode_snapshot(await self._commands.call("release", "prefill", *attempts)))
            for place in places:
                place.owes_prefill = False

    # --- tasks ------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` in the background; False when `run` does not run any more."""
        try:
            if self._tasks is not None:
                self._tasks.create_task(work)
                return True
        except RuntimeError:  # the group is being cancelled
            pass
        work.close()
        return False

    async def _owned(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, even when the caller is cancelled meanwhile: that takes effect after the end."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda future: future.exception())  # a cancelled caller does not ask for it

        async def carry() -> None:
            try:
                await work
            except ServingError as error:
                done.set_exception(error)
            except BaseException:
                done.set_exception(_shutting_down())
                raise
            else:
                done.set_result(None)

        if not self._start(carry()):
            work.close()
            raise _shutting_down()
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait({done})  # bounded by the call's timeout; a second cancellation ends it
            raise

    async def _listen(self) -> None:
        """Hears of grants by others and of new credit; what is missed while disconnected, a tick finds."""
        while True:
            pubsub = self._subscriber.pubsub()
            try:
                with no_lost_cancel():
                    await pubsub.subscribe(self._wake_channel, self._own_channel)
                self._tick_now.set()
                async for message in pubsub.listen():
                    if message["type"] != "message":
                        continue
                    if message["channel"] == self._wake_channel:
                        self._dispatcher.wake()
                    else:
                        self._deliver(decode_grant(message["data"]))
            except (RedisError, OSError):
                await asyncio.sleep(self._config.tick_s)
            finally:
                with suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _tick_forever(self) -> None:
        while True:
            with suppress(UnavailableError):
                await self._tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.tick_s):
                    await self._tick_now.wait()
            self._tick_now.clear()

    async def _tick(self) -> None:
        debts = [place for place in self._places.values() if place.owes_prefill]
        if debts:
            await self._pay_prefills(debts)
        live = [place for place in self._places.values() if place.is_admitted]
        for first in range(0, max(1, len(live)), _BATCH):
            self._dispatcher.offer(await self._renew(live[first : first + _BATCH]))

    async def _peek(self) -> Snapshot | None:
        return await self._renew([])

    async def _renew(self, places: Sequence[Place]) -> Snapshot | None:
        args = [part for place in places for part in (place.ticket.attempt_id, int(place.is_waiting))]
        unknown, messages, lost, snapshot = await self._commands.call("renew", self._lease_ms, *args)
        for message in messages:
            self._deliver(decode_grant(message))
        for attempt in lost:
            if attempt in self._places:
                gone = UnavailableError("the worker that was granted is gone; try again", reason="WORKER_LOST")
                self._places[attempt].fail(gone)
        missing = [self._places[attempt] for attempt in unknown if attempt in self._places]
        if missing:
            await self._restore(missing)
            # The snapshot is from before.
            self._dispatcher.wake()
            return None
        found = decode_snapshot(snapshot)
        if found is not None:
            self._views = found.views
        return found

    async def _restore(self, places: Sequence[Place]) -> None:
        entries = [place.entry(self._config.gateway_id) for place in places]
        held = [place for place in places if place.holds_prefill]
        await self._commands.call("restore", self._lease_ms, json.dumps(entries))
        # What was released while the script was under way came back with it.
        ended = [place.ticket.attempt_id for place in places if place.has_ended]
        if ended:
            await self._release("all", *ended)
        for place in held:
            place.owes_prefill = place.owes_prefill or not place.holds_prefill

    def _see(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self._views = snapshot.views
            self._dispatcher.offer(snapshot)

    def _deliver(self, message: GrantMessage) -> None:
        if message.gateway_id != self._config.gateway_id:
            return
        place = self._places.get(message.grant.attempt_id)
        if place is not None:
            place.deliver(message)
        else:  # it was given up while it was granted
            self._start(self._release("all", message.grant.attempt_id))

    @property
    def _lease_ms(self) -> int:
        return round(self._config.lease_s * 1000)


def _shutting_down() -> UnavailableError:
    return UnavailableError("the gateway is shutting down", reason="SHUTTING_DOWN")


def _already_exists(ticket: Ticket) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"request_id: {ticket.request_id} is running; wait for its end or use another id",
        reason="REQUEST_ID_LIVE",
        metadata={"request_id": ticket.request_id},
    )


def _full(ticket: Ticket, limits: ClassLimits, reply: Sequence[Any]) -> ResourceExhaustedError:
    _, what, num_waiting, retry_ms = reply
    limit = f"{limits.max_waiting} requests" if what == "requests" else f"{limits.max_waiting_tokens} prompt tokens"
    return ResourceExhaustedError(
        f"the queue of class {ticket.queue_class} is full: {num_waiting} requests wait, the limit is {limit}",
        reason="QUEUE_FULL",
        # Spread, so that those who were refused together do not come back together.
        retry_after_s=retry_ms / 1000 * random.uniform(1.0, 1.25),
        metadata={"queue_class": ticket.queue_class, "num_waiting": str(num_waiting)},
    )
