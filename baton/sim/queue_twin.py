"""The admission queue's scripts once more, in memory and with time passed in.

What the scripts in `baton/coordination/scripts` decide, this decides alike, ticket by ticket; a property test holds
the two against each other. Leases, losses and several gateways are left out: in a simulation nobody dies.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from baton.coordination.wire import Head, Reservation, Snapshot
from baton.core.workers import WorkerView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.coordination.limits import ClassLimits
    from baton.core.workers import Route, Ticket, WorkerRecord

_DEFAULT_INTERVAL_MS = 1000.0

# How a tenant's tickets stand: higher priority first, then by order of arrival.
_Waiting: TypeAlias = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A place in the queue. `wait_ms` is -1 while nothing has been measured."""

    position: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` is `exists`, `requests`, `tokens` or `late`; then `after_ms` tells when to retry, or the predicted wait."""

    why: str
    after_ms: int = 0


@dataclass(slots=True)
class _Entry:
    ticket: Ticket
    order: int
    since_ms: int

    @property
    def key(self) -> _Waiting:
        return -self.ticket.priority, self.order, self.ticket.attempt_id


@dataclass(slots=True)
class _ClassQueue:
    # In the order of their turns; a tenant that was served, or comes, goes to the end. None without tickets.
    tenants: dict[str, list[_Waiting]] = field(default_factory=dict)
    num_waiting: int = 0
    waiting_tokens: int = 0
    tokens_of: Counter[str] = field(default_factory=Counter)
    num_prefills: int = 0
    turn: float = 0.0
    granted_at_ms: int = 0
    interval_ms: float | None = None

    def head(self) -> str:
        return next(iter(self.tenants.values()))[0][2]

    def ahead_of(self, tenant: str, before: int) -> int:
        """Tickets that are served before a tenant's ticket with `before` of its own in front."""
        ahead, turns = before, before + 1
        for name, tickets in self.tenants.items():
            if name == tenant:
                turns = before
            else:
                ahead += min(turns, len(tickets))
        return ahead


@dataclass(slots=True)
class _Grant:
    queue_class: str
    route: Route
    holds_prefill: bool = True


class QueueTwin:
    """One model's queue. Times are whole milliseconds of any clock that does not go back."""

    def __init__(self, classes: Mapping[str, ClassLimits]) -> None:
        self._limits = classes
        self._queues = {name: _ClassQueue() for name in sorted(classes)}
        # By id, in its order: the workers and what grants hold of them, as policies see it.
        self._views: dict[str, WorkerView] = {}
        self._entries: dict[str, _Entry] = {}
        self._request_ids: dict[str, str] = {}
        self._grants: dict[str, _Grant] = {}
        self._turn = 0.0
        self._reservation: Reservation | None = None

    @property
    def num_waiting(self) -> int:
        """Tickets without workers."""
        return sum(queue.num_waiting for queue in self._queues.values())

    def register(self, record: WorkerRecord) -> None:
        """Adds a worker."""
        self._views[record.worker_id] = WorkerView(record=record, granted_blocks=0, granted_seqs=0, heartbeat_age_s=0.0)
        self._views = dict(sorted(self._views.items()))

    def admit(self, ticket: Ticket, now_ms: int) -> Admitted | Refused:
        """See admit.lua. An attempt is admitted once."""
        queue, limits = self._queues[ticket.queue_class], self._limits[ticket.queue_class]
        if ticket.request_id in self._request_ids:
            return Refused("exists")
        refused = self._full(queue, limits, ticket)
        if refused is not None:
            return refused
        tickets = queue.tenants.get(ticket.tenant, [])
        entry = _Entry(ticket, self._next_order(tickets, ticket.priority, now_ms), now_ms)
        position = queue.ahead_of(ticket.tenant, bisect_left(tickets, entry.key))
        wait_ms = self._predicted_wait(queue, position, now_ms)
        if ticket.max_wait_s is not None and wait_ms > round(ticket.max_wait_s * 1000):
            return Refused("late", wait_ms)
        insort(queue.tenants.setdefault(ticket.tenant, []), entry.key)
        queue.num_waiting += 1
        queue.waiting_tokens += ticket.prompt_tokens
        queue.tokens_of[ticket.tenant] += ticket.prompt_tokens
        self._entries[ticket.attempt_id] = entry
        self._request_ids[ticket.request_id] = ticket.attempt_id
        return Admitted(position, wait_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        """What the policy decides on; see `snapshot()` in common.lua."""
        return Snapshot(
            heads=tuple(self._head(queue, now_ms) for queue in self._queues.values() if queue.tenants),
            views=tuple(self._views.values()),
            taken_us=now_ms * 1000,
            reservation=self._valid_reservation(),
        )

    def grant(self, attempt_id: str, route: Route, now_ms: int) -> str:
        """See grant.lua: `granted`, `stale`, `prefills` or `credit`."""
        entry = self._entries.get(attempt_id)
        if entry is None or attempt_id in self._grants:
            return "stale"
        ticket = entry.ticket
        if ticket.max_wait_s is not None and now_ms > entry.since_ms + round(ticket.max_wait_s * 1000):
            self.end(attempt_id)
            return "stale"
        queue, limits = self._queues[ticket.queue_class], self._limits[ticket.queue_class]
        if queue.head() != attempt_id:
            return "stale"
        if limits.max_prefills is not None and queue.num_prefills >= limits.max_prefills:
            return "prefills"
        kept = self._valid_reservation()
        sides = (
            (route.prefill_id, route.prefill_blocks, 1),
            (route.decode_id, route.decode_blocks, ticket.num_choices),
        )
        if not all(self._has_credit(*side, None if kept and kept.attempt_id == attempt_id else kept) for side in sides):
            return "credit"
        if kept is not None and kept.attempt_id == attempt_id:
            self._reservation = None
        self._dequeue(entry)
        if ticket.tenant in queue.tenants:
            queue.tenants[ticket.tenant] = queue.tenants.pop(ticket.tenant)
        self._charge(route.prefill_id, route.prefill_blocks, 1, route.prefill_tokens)
        self._charge(route.decode_id, route.decode_blocks, ticket.num_choices, 0)
        queue.num_prefills += 1
        self._grants[attempt_id] = _Grant(ticket.queue_class, route)
        self._take_turn(queue, limits, now_ms, entry.since_ms)
        return "granted"

    def reserve(self, attempt_id: str, route: Route, least_ms: int, now_ms: int) -> None:
        """See reserve.lua."""
        entry = self._entries.get(attempt_id)
        if entry is None or attempt_id in self._grants or self._valid_reservation() is not None:
            return
        queue = self._queues[entry.ticket.queue_class]
        is_stuck = now_ms - max(queue.granted_at_ms, entry.since_ms) >= least_ms
        if queue.head() == attempt_id and is_stuck:
            route = replace(route, prefill_tokens=0)
            num_choices = entry.ticket.num_choices
            self._reservation = Reservation(attempt_id=attempt_id, route=route, num_choices=num_choices)

    def release_prefill(self, attempt_id: str) -> None:
        """Gives the prefill worker's credit back. Again it changes nothing."""
        grant = self._grants.get(attempt_id)
        if grant is not None and grant.holds_prefill:
            grant.holds_prefill = False
            self._queues[grant.queue_class].num_prefills -= 1
            route = grant.route
            self._charge(route.prefill_id, -route.prefill_blocks, -1, -route.prefill_tokens)

    def end(self, attempt_id: str) -> None:
        """Ends a ticket whatever its state."""
        entry = self._entries.pop(attempt_id, None)
        if entry is None:
            return
        del self._request_ids[entry.ticket.request_id]
        if attempt_id in self._grants:
            self.release_prefill(attempt_id)
            route = self._grants.pop(attempt_id).route
            self._charge(route.decode_id, -route.decode_blocks, -entry.ticket.num_choices, 0)
        else:
            self._dequeue(entry)

    def _charge(self, worker_id: str, blocks: int, seqs: int, tokens: int) -> None:
        view = self._views[worker_id]
        self._views[worker_id] = WorkerView(
            record=view.record,
            granted_blocks=view.granted_blocks + blocks,
            granted_seqs=view.granted_seqs + seqs,
            heartbeat_age_s=0.0,
            granted_tokens=view.granted_tokens + tokens,
        )

    def _full(self, queue: _ClassQueue, limits: ClassLimits, ticket: Ticket) -> Refused | None:
        waiting, tokens = queue.num_waiting, queue.waiting_tokens
        max_waiting, max_tokens = limits.max_waiting, limits.max_waiting_tokens
        own = len(queue.tenants.get(ticket.tenant, ()))
        num_tenants = len(queue.tenants) + (own == 0)
        if num_tenants > 1 and own < max_waiting // num_tenants:
            max_waiting *= 2
        if num_tenants > 1 and queue.tokens_of[ticket.tenant] + ticket.prompt_tokens <= max_tokens / num_tenants:
            max_tokens *= 2
        why, excess = "requests", max(waiting + 1 - max_waiting, 0)
        if excess == 0:
            if waiting == 0 or tokens + ticket.prompt_tokens <= max_tokens:
                return None
            why, excess = "tokens", math.ceil((tokens + ticket.prompt_tokens - max_tokens) * waiting / tokens)
        interval = _DEFAULT_INTERVAL_MS if queue.interval_ms is None else queue.interval_ms
        leaving = max(excess, math.ceil(waiting / 10), 1)
        return Refused(why, math.floor(min(max(interval * leaving, 100), 30_000)))

    @staticmethod
    def _next_order(tickets: list[_Waiting], priority: int, now_ms: int) -> int:
        end = bisect_left(tickets, (-priority + 1, 0, ""))
        has_peer = end > 0 and tickets[end - 1][0] == -priority
        return max(now_ms, tickets[end - 1][1] + 1) if has_peer else now_ms

    def _predicted_wait(self, queue: _ClassQueue, ahead: int, now_ms: int) -> int:
        if ahead == 0:
            return 0
        if queue.interval_ms is None:
            return -1
        standstill = now_ms - max(queue.granted_at_ms, self._entries[queue.head()].order)
        interval = queue.interval_ms
        if standstill > interval:
            interval = 0.8 * interval + 0.2 * standstill
        return math.floor(interval * ahead)

    def _head(self, queue: _ClassQueue, now_ms: int) -> Head:
        entry = self._entries[queue.head()]
        return Head(
            ticket=entry.ticket,
            num_prefills=queue.num_prefills,
            turn=max(self._turn, queue.turn),
            order=entry.order,
            standstill_s=(now_ms - max(queue.granted_at_ms, entry.since_ms)) / 1000,
        )

    def _valid_reservation(self) -> Reservation | None:
        kept = self._reservation
        if kept is not None:
            entry = self._entries.get(kept.attempt_id)
            queue = self._queues[entry.ticket.queue_class] if entry else None
            if queue is None or not queue.tenants or queue.head() != kept.attempt_id:
                self._reservation = None
        return self._reservation

    def _has_credit(self, worker_id: str, blocks: int, seqs: int, kept: Reservation | None) -> bool:
        """Whether a worker has so much beside what is kept for another ticket."""
        view = self._views[worker_id]
        if kept is not None:
            (view,) = kept.hide_from([view])
        return view.free_blocks >= blocks and view.free_seqs >= seqs

    def _dequeue(self, entry: _Entry) -> None:
        queue = self._queues[entry.ticket.queue_class]
        tickets = queue.tenants[entry.ticket.tenant]
        del tickets[bisect_left(tickets, entry.key)]
        if not tickets:
            del queue.tenants[entry.ticket.tenant]
        queue.num_waiting -= 1
        queue.waiting_tokens -= entry.ticket.prompt_tokens
        queue.tokens_of[entry.ticket.tenant] -= entry.ticket.prompt_tokens

    def _take_turn(self, queue: _ClassQueue, limits: ClassLimits, now_ms: int, since_ms: int) -> None:
        self._turn = max(self._turn, queue.turn)
        queue.turn = self._turn + 1 / limits.weight
        interval = float(now_ms - max(queue.granted_at_ms, since_ms))
        mean = interval if queue.interval_ms is None else 0.8 * queue.interval_ms + 0.2 * interval
        queue.interval_ms = float(f"{mean:.3f}")  # as the scripts keep it
        queue.granted_at_ms = now_ms
