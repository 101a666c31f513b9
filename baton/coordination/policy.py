"""Who is served next, and for whom credit is kept. Pure: a snapshot in, a decision out.

Scripts check every decision again before they commit it, so it may rest on a snapshot that is a little old.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.coordination.limits import QueueConfig
    from baton.coordination.wire import Head, Snapshot
    from baton.core.workers import Route, Ticket, WorkerView

    RouteChoice: TypeAlias = Callable[[Ticket, Sequence[WorkerView]], Route | None]

# How often one head is tried in one round when another gateway takes the credit that the snapshot showed.
_TRIES = 3
# How full workers may be until a stuck head finds a pair that is to be kept: the pair with the least to wait for.
_SHARES = (0.75, 0.5, 0.25, 0.0)


class Policy:
    """The decisions of one gateway's dispatcher."""

    def __init__(self, route: RouteChoice, config: QueueConfig) -> None:
        self._route = route
        self._config = config

    def choose(self, snapshot: Snapshot, tries: Mapping[str, int]) -> tuple[Head, Route] | None:
        """The first head in turn for which there are workers. A head without never holds up another class.

        `tries` counts, by attempt, what this round has tried in vain.
        """
        kept = snapshot.reservation
        others_views = snapshot.views if kept is None else kept.hide_from(snapshot.views)
        for head in sorted(snapshot.heads, key=lambda head: (head.turn, head.order)):
            if tries.get(head.ticket.attempt_id, 0) >= _TRIES or not self._may_run(head):
                continue
            is_kept_for = kept is not None and kept.attempt_id == head.ticket.attempt_id
            route = self._route(head.ticket, snapshot.views if is_kept_for else others_views)
            if route is not None:
                return head, route
        return None

    def reserve(self, snapshot: Snapshot) -> tuple[Head, Route] | None:
        """The head that has been without workers for longest, and too long, and the pair to keep for it."""
        stuck = [head for head in snapshot.heads if head.standstill_s >= self._config.reserve_after_s]
        stuck = [head for head in stuck if self._may_run(head)]
        if not stuck or snapshot.reservation is not None:
            return None
        head = max(stuck, key=lambda head: head.standstill_s)
        for share in _SHARES:
            route = self._route(head.ticket, [_relieved(view, share) for view in snapshot.views])
            if route is not None:
                return head, route
        return None

    def _may_run(self, head: Head) -> bool:
        limits = self._config.classes.get(head.ticket.queue_class)
        # A class of another gateway's configuration only: that gateway knows its limits.
        return limits is not None and (limits.max_prefills is None or head.num_prefills < limits.max_prefills)


def _relieved(view: WorkerView, share: float) -> WorkerView:
    """The worker with only so much of what is granted on it now."""
    return replace(
        view,
        granted_blocks=int(view.granted_blocks * share),
        granted_seqs=int(view.granted_seqs * share),
        granted_tokens=int(view.granted_tokens * share),
    )
