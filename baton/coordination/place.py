"""One ticket's place in the queue, from admission to its release."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from baton.coordination.wire import encode_ticket

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Self

    from baton.coordination.wire import GrantMessage
    from baton.core.errors import UnavailableError
    from baton.core.workers import Grant, Ticket


class PlaceOwner(Protocol):
    """What a place asks of its queue."""

    async def enter(self, place: Place) -> None:
        """Admits the place's ticket."""
        ...

    async def leave(self, place: Place) -> None:
        """Gives back all that the ticket holds."""
        ...

    async def end_prefill(self, place: Place) -> None:
        """Gives back what the ticket holds of its prefill worker."""
        ...


class Place:
    """`async with queue.admit(ticket) as place:` owns a ticket. Made by the queue only; entered once.

    Leaving the block, however it is left, gives everything back exactly once. That is shielded from cancellation
    and bounded by the queue's `call_timeout_s`; when Redis is away, the lease ends and frees it.
    """

    def __init__(self, ticket: Ticket, owner: PlaceOwner, former: Place | None = None) -> None:
        self.ticket = ticket
        self.former = former
        """Whose place in the queue this one takes."""
        self.position = 0
        """Tickets of the class that were ahead at admission, 0 for the first."""
        self.predicted_wait_s: float | None = None
        """How long they take if the class goes on as it did lately; None when nothing is known yet."""
        self.order = 0
        self.since_ms = 0
        self.is_admitted = False
        self.has_ended = False
        self._owner = owner
        self._message: GrantMessage | None = None
        self.holds_prefill = True
        self.owes_prefill = False
        """Whether Redis has not yet heard that the prefill credit is back."""
        self._granted: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        # Whoever leaves early never asks for the result.
        self._granted.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def __aenter__(self) -> Self:
        await self._owner.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._owner.leave(self)

    @property
    def attempt_ids(self) -> tuple[str, ...]:
        """All attempts that may hold something by this place."""
        if self.former is None or self.is_admitted:
            return (self.ticket.attempt_id,)
        return (self.former.ticket.attempt_id, self.ticket.attempt_id)

    async def granted(self) -> Grant:
        """Waits, without a limit, for a pair of workers; may be called again. UnavailableError when the queue ends.

        A Redis that goes away prolongs the wait: the ticket takes its old place when it is back.
        """
        return await asyncio.shield(self._granted)

    async def release_prefill(self) -> None:
        """Gives the prefill worker's credit back early: call it when the worker's blocks are free. May be repeated.

        Bounded like leaving the block. When Redis is away it raises nothing: the queue tries again.
        """
        if self.holds_prefill and self._message is not None:
            self.holds_prefill = False
            self.owes_prefill = True
            await self._owner.end_prefill(self)

    @property
    def is_waiting(self) -> bool:
        """Whether no grant has been delivered yet."""
        return not self._granted.done()

    def deliver(self, message: GrantMessage) -> None:
        """Ends the wait. A message that comes twice changes nothing."""
        if not self._granted.done():
            self._message = message
            self._granted.set_result(message.grant)

    def fail(self, error: UnavailableError) -> None:
        """Ends the wait with an error."""
        if not self._granted.done():
            self._granted.set_exception(error)

    def entry(self, gateway_id: str) -> dict[str, Any]:
        """What the restore script needs to put this place back."""
        ticket: dict[str, Any] = encode_ticket(self.ticket, gateway_id)
        ticket |= {"order": self.order, "since": self.since_ms}
        entry: dict[str, Any] = {"attempt_id": self.ticket.attempt_id, "ticket": ticket}
        if self._message is not None:
            grant, route = self._message.grant, self._message.route
            entry["grant"] = {
                "class": self.ticket.queue_class,
                "queue_ms": round(grant.queue_s * 1000),
                "prefill": {
                    "id": route.prefill_id,
                    "incarnation": grant.prefill.incarnation,
                    "blocks": route.prefill_blocks,
                    "tokens": route.prefill_tokens,
                    "held": self.holds_prefill,
                },
                "decode": {
                    "id": route.decode_id,
                    "incarnation": grant.decode.incarnation,
                    "blocks": route.decode_blocks,
                    "seqs": self.ticket.num_choices,
                    "tokens": 0,
                    "held": True,
                },
            }
        return entry
