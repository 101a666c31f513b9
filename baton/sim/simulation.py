"""A deployment on a virtual clock: requests from their arrival to their last token, or to their refusal.

The queue's policy, routing and both schedulers are the code that runs in production; the queue's scripts are replaced
by their twin, computing by its cost. Nothing fails here, and clients do not retry.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from baton.coordination.limits import QueueConfig
from baton.coordination.policy import Policy
from baton.core.model import ModelFingerprint
from baton.core.workers import Ticket, WorkerRecord, WorkerRole, WorkerState
from baton.sim.decode import SimDecode
from baton.sim.load import Costs
from baton.sim.queue_twin import Admitted, QueueTwin
from baton.sim.workers import SimPrefill, WorkerSize
from gateway.routing import Router

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from baton.coordination.wire import Snapshot
    from baton.core.workers import Route, WorkerView
    from baton.sim.load import Arrival
    from gateway.classes import QueueClasses

_MODEL = ModelFingerprint(model="simulated", weights="w", tokenizer="t", dtype="float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers of a deployment, and the share of the longest output for which a request has blocks reserved."""

    num_prefill: int
    num_decode: int
    prefill: WorkerSize
    decode: WorkerSize
    costs: Costs = field(default_factory=Costs)
    reserved_output_share: float = 1.0


@dataclass(slots=True)
class Outcome:
    """One request's life; times in seconds of the virtual clock. `end` is `tokens` or why there are none, or no more.

    `num_preempted`: how often it was swapped out for want of blocks.
    """

    arrival: Arrival
    queue_class: str
    end: str = ""
    granted_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_preempted: int = 0
    route: Route | None = None


class Simulation:
    """One run. `run` is called once."""

    def __init__(self, fleet: Fleet, classes: QueueClasses, *, reserve_after_s: float = 5.0) -> None:
        self._classes = classes
        self._twin = QueueTwin(classes.limits)
        self._reserve_after_s = reserve_after_s
        config = QueueConfig(gateway_id="simulated", classes=classes.limits, reserve_after_s=reserve_after_s)
        router = FleetRouter(fleet)
        self._policy = Policy(router.choose_route, config)
        self._prefills = {f"p{index:05}": SimPrefill(fleet.prefill, fleet.costs) for index in range(fleet.num_prefill)}
        self._decodes = {f"d{index:05}": SimDecode(fleet.decode, fleet.costs) for index in range(fleet.num_decode)}
        for name in self._prefills:
            self._twin.register(_record(name, WorkerRole.PREFILL, fleet.prefill))
        for name in self._decodes:
            self._twin.register(_record(name, WorkerRole.DECODE, fleet.decode))
        # Time, class, number, what happens. Of one moment the ends of decode steps come first, worker by worker, so
        # that their order does not depend on how many steps were taken at once.
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._numbers = count()
        self._ranks = {name: rank for rank, name in enumerate(self._decodes)}
        self._expected_ends: dict[str, float] = {}
        # Nobody was granted in the last round of the dispatcher, and nothing has come back or left the queue since.
        self._is_settled = False
        self._now_s = 0.0
        self._waiting: dict[str, Outcome] = {}
        self._running: dict[str, Outcome] = {}
        self._ended: list[Outcome] = []

    def run(self, arrivals: Iterable[Arrival]) -> Iterator[Outcome]:
        """All requests as they end; none is kept. AssertionError when a block or a credit is left over.

        `arrivals` are in the order of their times. Each must fit on some worker.
        """
        for number, arrival in enumerate(arrivals):
            self._run_until(arrival.at_s)
            self._arrive(arrival, str(number))
            yield from self._ended
            self._ended.clear()
        self._run_until(float("inf"))
        yield from self._ended
        assert not self._waiting, "requests wait and nothing happens any more"
        assert not self._running, "requests run and nothing happens any more"
        for prefill in self._prefills.values():
            prefill.assert_idle()
        for decode in self._decodes.values():
            decode.assert_idle()
        assert all(view.granted_blocks == view.granted_seqs == 0 for view in self._twin.snapshot(0).views)

    @property
    def most_used_share(self) -> float:
        """The largest part of its blocks that a decode worker has had in use."""
        return max(decode.most_used_blocks / decode.num_blocks for decode in self._decodes.values())

    @property
    def _now_ms(self) -> int:
        return int(self._now_s * 1000)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, len(self._ranks), next(self._numbers), act))

    def _run_until(self, end_s: float) -> None:
        while self._events and self._events[0][0] <= end_s:
            self._now_s, _, _, act = heapq.heappop(self._events)
            act()
        if end_s != float("inf"):
            self._now_s = end_s

    def _arrive(self, arrival: Arrival, name: str) -> None:
        queue_class = self._classes.classify(arrival.prompt_tokens)
        outcome = Outcome(arrival, queue_class.name)
        ticket = Ticket(
            attempt_id=name,
            request_id=name,
            queue_class=queue_class.name,
            prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.max_tokens,
            num_choices=len(arrival.output_tokens),
            tenant=arrival.tenant,
            max_wait_s=queue_class.queue_timeout_s,
        )
        answer = self._twin.admit(ticket, self._now_ms)
        if not isinstance(answer, Admitted):
            self._end(outcome, "late" if answer.why == "late" else "full")
            return
        self._waiting[name] = outcome
        self._after(queue_class.queue_timeout_s, lambda: self._time_out(name))
        if answer.position == 0 or not self._is_settled:
            self._dispatch()
        else:  # the heads and the workers are those of the last round, and so would be its end
            self._reserve(self._twin.snapshot(self._now_ms))

    def _time_out(self, name: str) -> None:
        outcome = self._waiting.pop(name, None)
        if outcome is not None:
            self._end(outcome, "timeout")
            self._twin.end(name)
            self._dispatch()

    def _dispatch(self) -> None:
        """A dispatcher's round."""
        self._is_settled = False
        while self._twin.num_waiting:
            snapshot = self._twin.snapshot(self._now_ms)
            choice = self._policy.choose(snapshot, {})
            if choice is None:
                self._is_settled = True
                self._reserve(snapshot)
                return
            head, route = choice
            name = head.ticket.attempt_id
            if self._twin.grant(name, route, self._now_ms) == "granted":
                outcome = self._running[name] = self._waiting.pop(name)
                outcome.granted_s, outcome.route = self._now_s, route
                self._prefills[route.prefill_id].add(name, outcome.arrival.prompt_tokens, self._now_s)
                self._step_prefill(route.prefill_id)
            else:  # it expired in this very moment: its time-out comes next
                return

    def _reserve(self, snapshot: Snapshot) -> None:
        choice = self._policy.reserve(snapshot)
        if choice is not None:
            head, route = choice
            least_ms = round(self._reserve_after_s * 1000)
            self._twin.reserve(head.ticket.attempt_id, route, least_ms, self._now_ms)
            self._is_settled = False

    def _step_prefill(self, worker_id: str) -> None:
        prefill = self._prefills[worker_id]
        duration_s = prefill.begin_step(self._now_s)
        if duration_s is not None:
            self._after(duration_s, lambda: self._end_prefill_step(worker_id))
        elif (duration_s := prefill.begin_interrupt(self._now_s)) is not None:
            self._after(duration_s, lambda: self._end_interrupt(worker_id))

    def _end_interrupt(self, worker_id: str) -> None:
        self._take_first_tokens(worker_id, self._prefills[worker_id].end_interrupt())

    def _end_prefill_step(self, worker_id: str) -> None:
        held_up_s = self._prefills[worker_id].take_held_up_s()
        if held_up_s:
            self._after(held_up_s, lambda: self._end_prefill_step(worker_id))
        else:
            self._take_first_tokens(worker_id, self._prefills[worker_id].end_step())

    def _take_first_tokens(self, worker_id: str, names: list[str]) -> None:
        for name in names:
            outcome = self._running[name]
            outcome.first_token_s = self._now_s
            assert outcome.route is not None
            if max(outcome.arrival.output_tokens) == 1:
                self._prefills[worker_id].release(name)
                self._finish(name)
            else:
                self._decodes[outcome.route.decode_id].add(name, outcome.arrival)
                self._plan_decode(outcome.route.decode_id)
        self._step_prefill(worker_id)

    def _plan_decode(self, worker_id: str) -> None:
        """Lets a decode worker plan with what has come: at once when it is idle, else after the step that runs."""
        decode = self._decodes[worker_id]
        decode.catch_up(self._now_s)
        begun = decode.begin(self._now_s)
        for name, copy_s in begun.copies:
            self._after(copy_s, lambda name=name: self._end_copy(worker_id, name))  # type: ignore[misc]
        for name, swap_s in begun.swaps:
            self._after(swap_s, lambda name=name: self._end_swap(worker_id, name))  # type: ignore[misc]
        for name in begun.preempted:
            self._running[name].num_preempted += 1
        end_s = decode.end_s
        if end_s is not None and end_s != self._expected_ends.get(worker_id):
            self._expected_ends[worker_id] = end_s
            event = (end_s, self._ranks[worker_id], next(self._numbers), lambda: self._end_decode_steps(worker_id))
            heapq.heappush(self._events, event)
        for name in begun.shed:
            self._finish(name, "shed")

    def _end_copy(self, worker_id: str, name: str) -> None:
        route = self._running[name].route
        assert route is not None
        self._decodes[worker_id].end_copy(name)
        self._prefills[route.prefill_id].release(name)
        self._twin.release_prefill(name)
        self._plan_decode(worker_id)
        self._step_prefill(route.prefill_id)
        self._dispatch()

    def _end_swap(self, worker_id: str, name: str) -> None:
        self._decodes[worker_id].end_swap(name)
        self._plan_decode(worker_id)

    def _end_decode_steps(self, worker_id: str) -> None:
        decode = self._decodes[worker_id]
        if decode.end_s != self._now_s:
            return  # something came before, and the steps were cut short
        del self._expected_ends[worker_id]
        for name in decode.end():
            self._finish(name)
        self._plan_decode(worker_id)

    def _finish(self, name: str, end: str = "tokens") -> None:
        self._end(self._running.pop(name), end)
        self._twin.end(name)
        self._dispatch()

    def _end(self, outcome: Outcome, end: str) -> None:
        outcome.end, outcome.ended_s = end, self._now_s
        self._ended.append(outcome)


class FleetRouter(Router):
    """Routes among a fleet's workers as `Router` does, knowing that all are ready and can serve with each other.

    Workers are told in the order of their names, in which those that decode come first.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(_MODEL, reserved_output_share=fleet.reserved_output_share)
        self._num_decode = fleet.num_decode

    def sides(
        self, views: Sequence[WorkerView], avoids: Collection[str] = ()
    ) -> Iterator[tuple[Sequence[WorkerView], Sequence[WorkerView]]]:
        """Those that prefill, and those that decode."""
        assert not avoids, "nobody is lost"
        yield views[self._num_decode :], views[: self._num_decode]


def _record(worker_id: str, role: WorkerRole, size: WorkerSize) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation="i",
        role=role,
        state=WorkerState.READY,
        address="simulated:1",
        host_id="host",
        fingerprint=_MODEL,
        block_size=size.block_size,
        num_blocks=size.num_blocks,
        max_num_seqs=size.max_num_seqs,
        max_context_tokens=size.num_blocks * size.block_size,
    )
