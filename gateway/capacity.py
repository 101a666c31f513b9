"""What no wait in the queue can serve, told before a ticket gets into it: it would wait at the head of its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import OutOfRangeError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.queue import AdmissionQueue
    from baton.core.errors import ServingError
    from baton.core.workers import Ticket, WorkerView
    from gateway.routing import Router


async def refusal_of(ticket: Ticket, queue: AdmissionQueue, router: Router, model: str) -> ServingError | None:
    """Why no worker that is there could ever serve the ticket; None when one could, or when Redis is away.

    UnavailableError for no pair of workers at all, OutOfRangeError for what none could hold. What was seen last may be
    a tick old, so Redis is asked before a refusal: workers that came since count. Raises UnavailableError when that
    fails.
    """
    if not queue.is_available:
        return None  # admission says so itself
    if _refusal(ticket, queue.views, router, model) is None:
        return None
    return _refusal(ticket, await queue.workers(), router, model)


def no_worker(model: str, *, waited_s: float = 0.0) -> UnavailableError:
    """No pair is there to serve a request, after a wait of `waited_s` if there was one."""
    waited = f", and none came within {waited_s:g} s (queue_timeout_s)" if waited_s else ""
    return UnavailableError(f"no pair of workers serves {model!r} now{waited}", reason="NO_WORKER")


def _refusal(ticket: Ticket, views: Sequence[WorkerView], router: Router, model: str) -> ServingError | None:
    if not router.has_pair(views):
        return no_worker(model)
    most_choices = router.most_choices(views)
    if ticket.num_choices > most_choices:
        description = f"{ticket.num_choices} is over the {most_choices} that a worker generates at a time"
        return OutOfRangeError("n", description, limit=most_choices)
    room = router.most_output_tokens(ticket.prompt_tokens, views, num_choices=ticket.num_choices)
    if ticket.max_tokens <= room:
        return None
    outputs = "" if ticket.num_choices == 1 else f" and {ticket.num_choices} outputs"
    return OutOfRangeError(
        "stop.max_tokens",
        f"{ticket.max_tokens} is over the {room} for which the workers have memory after a prompt of"
        f" {ticket.prompt_tokens} tokens{outputs}",
        limit=room,
    )
