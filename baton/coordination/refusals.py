"""The errors with which a queue refuses a ticket or ends its wait."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from baton.core.errors import AlreadyExistsError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.limits import ClassLimits
    from baton.core.workers import Ticket


def shutting_down() -> UnavailableError:
    """The gateway ends."""
    return UnavailableError("the gateway is shutting down", reason="SHUTTING_DOWN")


def redis_away() -> UnavailableError:
    """Nobody can be admitted."""
    return UnavailableError("Redis is away; try again", reason="REDIS_UNAVAILABLE")


def worker_lost() -> UnavailableError:
    """A worker ended between the grant and the news of it."""
    return UnavailableError("the worker that was granted is gone; try again", reason="WORKER_LOST")


def already_exists(ticket: Ticket) -> AlreadyExistsError:
    """The same request runs."""
    return AlreadyExistsError(
        f"request_id: {ticket.request_id} is running; wait for its end or use another id",
        reason="REQUEST_ID_LIVE",
        metadata={"request_id": ticket.request_id},
    )


def full(ticket: Ticket, limits: ClassLimits, reply: Sequence[Any]) -> ResourceExhaustedError:
    """The class takes no more; `reply` is the admit script's."""
    _, what, num_waiting, retry_ms = reply
    limit = f"{limits.max_waiting} requests" if what == "requests" else f"{limits.max_waiting_tokens} prompt tokens"
    return ResourceExhaustedError(
        f"the queue of class {ticket.queue_class} is full: {num_waiting} requests wait, the limit is {limit}",
        reason="QUEUE_FULL",
        # Spread, so that those who were refused together do not come back together.
        retry_after_s=retry_ms / 1000 * random.uniform(1.0, 1.25),
        metadata={"queue_class": ticket.queue_class, "num_waiting": str(num_waiting)},
    )
