"""The errors with which a queue refuses a ticket or ends its wait."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from baton.core.errors import AlreadyExistsError, ResourceExhaustedError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.limits import ClassLimits
    from baton.core.workers import Ticket


_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 30.0


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


def too_late(ticket: Ticket, wait_ms: int) -> ResourceExhaustedError:
    """The ticket would wait longer than it can."""
    assert ticket.max_wait_s is not None
    wait_s = wait_ms / 1000
    return ResourceExhaustedError(
        f"the queue of class {ticket.queue_class} has a wait of about {wait_s:.3g} s, the request can wait"
        f" {ticket.max_wait_s:.3g} s",
        reason="DEADLINE_UNMEETABLE",
        retry_after_s=min(max(wait_s - ticket.max_wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S) * _spread(),
        metadata={"queue_class": ticket.queue_class, "predicted_wait_s": f"{wait_s:.3f}"},
    )


def full(ticket: Ticket, limits: ClassLimits, reply: Sequence[Any]) -> ResourceExhaustedError:
    """The class takes no more; `reply` is the admit script's."""
    _, what, num_waiting, retry_ms = reply
    limit = f"{limits.max_waiting} requests" if what == "requests" else f"{limits.max_waiting_tokens} prompt tokens"
    return ResourceExhaustedError(
        f"the queue of class {ticket.queue_class} is full: {num_waiting} requests wait, the limit is {limit}",
        reason="QUEUE_FULL",
        retry_after_s=retry_ms / 1000 * _spread(),
        metadata={"queue_class": ticket.queue_class, "num_waiting": str(num_waiting)},
    )


def _spread() -> float:
    """Those who were refused together do not come back together."""
    return random.uniform(1.0, 1.25)
