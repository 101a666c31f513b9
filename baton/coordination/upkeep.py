"""Keeps a gateway's live places true: hears of grants, renews leases, puts back what Redis lost, pays debts."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from baton.coordination.commands import no_lost_cancel
from baton.coordination.refusals import worker_lost
from baton.coordination.wire import decode_grant, decode_snapshot
from baton.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.client import RedisConnection
    from baton.coordination.commands import Commands
    from baton.coordination.dispatch import Dispatcher
    from baton.coordination.keys import Keys
    from baton.coordination.limits import QueueConfig
    from baton.coordination.owned import OwnedTasks
    from baton.coordination.place import Place
    from baton.coordination.wire import GrantMessage, Snapshot
    from baton.core.workers import WorkerView

# Tickets in one call of a script, so that none holds up Redis for more than a few milliseconds.
BATCH = 500


class Upkeep:
    """The state of one gateway's places between itself and Redis. All calls come from one event loop."""

    def __init__(self, commands: Commands, dispatcher: Dispatcher, tasks: OwnedTasks, config: QueueConfig) -> None:
        self.places: dict[str, Place] = {}
        """This gateway's tickets that have not ended, by attempt."""
        self.views: tuple[WorkerView, ...] = ()
        """The live workers as last seen."""
        self._commands = commands
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._config = config
        self._tick_now = asyncio.Event()

    # --- what places cause ------------------------------------------------------------------------------------

    def see(self, snapshot: Snapshot | None) -> None:
        """Takes a script's snapshot in: the workers, and heads to dispatch."""
        if snapshot is not None:
            self.views = snapshot.views
            self._dispatcher.offer(snapshot)

    async def release(self, *attempts: str) -> None:
        """Gives back all that tickets hold. Raises nothing: when Redis is away the leases do the same, later."""
        for first in range(0, len(attempts), BATCH):
            with suppress(UnavailableError):
                reply = await self._commands.call("release", "all", *attempts[first : first + BATCH])
                self.see(decode_snapshot(reply))

    async def pay_prefills(self, places: Sequence[Place]) -> None:
        """Gives back what tickets hold of their prefill workers. When Redis is away the next tick tries again."""
        with suppress(UnavailableError):
            attempts = [place.ticket.attempt_id for place in places]
            self.see(decode_snapshot(await self._commands.call("release", "prefill", *attempts)))
            for place in places:
                place.owes_prefill = False

    def deliver(self, message: GrantMessage) -> None:
        """Tells a place of its grant."""
        if message.gateway_id != self._config.gateway_id:
            return
        place = self.places.get(message.grant.attempt_id)
        if place is not None:
            place.deliver(message)
        else:  # it was given up while it was granted
            self._tasks.start(self.release(message.grant.attempt_id))

    # --- tasks ------------------------------------------------------------------------------------------------

    async def listen(self, connection: RedisConnection, keys: Keys) -> None:
        """Hears of grants by others and of new credit; what is missed while disconnected, a tick finds."""
        while True:
            pubsub = connection.subscriber.pubsub()
            try:
                with no_lost_cancel():
                    await pubsub.subscribe(keys.wake_channel, keys.gateway_channel(self._config.gateway_id))
                self._tick_now.set()
                async for message in pubsub.listen():
                    if message["type"] != "message":
                        continue
                    if message["channel"] == keys.wake_channel:
                        self._dispatcher.wake()
                    else:
                        self.deliver(decode_grant(message["data"]))
            except (RedisError, OSError):
                await asyncio.sleep(self._config.tick_s)
            finally:
                with suppress(RedisError, OSError):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def tick_forever(self) -> None:
        """Renews and pays every `tick_s`, and at once after each reconnection."""
        while True:
            with suppress(UnavailableError):
                await self._tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.tick_s):
                    await self._tick_now.wait()
            self._tick_now.clear()

    async def peek(self) -> Snapshot | None:
        """A fresh snapshot."""
        return await self._renew([])

    async def _tick(self) -> None:
        debts = [place for place in self.places.values() if place.owes_prefill]
        if debts:
            await self.pay_prefills(debts)
        live = [place for place in self.places.values() if place.is_admitted]
        for first in range(0, max(1, len(live)), BATCH):
            self._dispatcher.offer(await self._renew(live[first : first + BATCH]))

    async def _renew(self, places: Sequence[Place]) -> Snapshot | None:
        args = [part for place in places for part in (place.ticket.attempt_id, int(place.is_waiting))]
        unknown, messages, lost, snapshot = await self._commands.call("renew", self._config.lease_ms, *args)
        for message in messages:
            self.deliver(decode_grant(message))
        for attempt in lost:
            if attempt in self.places:
                self.places[attempt].fail(worker_lost())
        missing = [self.places[attempt] for attempt in unknown if attempt in self.places]
        if missing:
            await self._restore(missing)
            # The snapshot is from before.
            self._dispatcher.wake()
            return None
        found = decode_snapshot(snapshot)
        if found is not None:
            self.views = found.views
        return found

    async def _restore(self, places: Sequence[Place]) -> None:
        entries = [place.entry(self._config.gateway_id) for place in places]
        held = [place for place in places if place.holds_prefill]
        await self._commands.call("restore", self._config.lease_ms, json.dumps(entries))
        # What was released while the script was under way came back with it.
        await self.release(*[place.ticket.attempt_id for place in places if place.has_ended])
        for place in held:
            place.owes_prefill = place.owes_prefill or not place.holds_prefill
