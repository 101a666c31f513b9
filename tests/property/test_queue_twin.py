"""The queue's twin in memory and the scripts on a real Redis: the same calls, the same answers."""

from __future__ import annotations

import asyncio
import json
import time
from copy import deepcopy
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.coordination.client import connect
from baton.coordination.commands import Commands
from baton.coordination.limits import ClassLimits
from baton.coordination.wire import decode_snapshot, encode_record, encode_ticket
from baton.core.workers import Route
from baton.sim.queue_twin import Admitted, QueueTwin, Refused
from tests.fixtures.coordination import KEYS, record, ticket

if TYPE_CHECKING:
    from baton.coordination.embedded import EmbeddedRedis
    from baton.core.workers import WorkerView

BEATS, LOAD = KEYS.all[2], KEYS.all[10]
LEASE_MS = 600_000
CLASSES = {
    "chat": ClassLimits(max_waiting=6, max_waiting_tokens=900, weight=3.0),
    "long": ClassLimits(max_waiting=4, max_waiting_tokens=100_000, max_prefills=2),
}
WORKERS = [record(name, num_blocks=30, max_num_seqs=3) for name in ("p1", "p2", "d1", "d2")]
PAIRS = st.tuples(st.sampled_from(("p1", "p2")), st.sampled_from(("d1", "d2")))


class TwinMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connection = self.do(connect(SimpleNamespace(url=self.url, socket_timeout_s=60.0), KEYS))
        self.do(self.connection.commands.flushall())
        self.commands = Commands(self.connection, KEYS, timeout_s=60.0)
        self.twin = QueueTwin(CLASSES)
        self.blocks: dict[str, int] = {}
        self.count = self.now_ms = 0
        for worker in WORKERS:
            self.call("heartbeat", worker.worker_id, "i1", encode_record(worker), KEYS.wake_channel)
            self.twin.register(worker)
        # In the twin nobody dies: however long this test is held up, they have beaten lately.
        in_an_hour_ms = (time.time() + 3600) * 1000
        self.do(self.connection.commands.zadd(BEATS, {worker.worker_id: in_an_hour_ms for worker in WORKERS}))

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def call(self, name: str, *args: Any) -> Any:
        return self.do(self.commands.call(name, *args))

    def redis_ms(self) -> int:
        seconds, microseconds = self.do(self.connection.commands.time())
        return seconds * 1000 + microseconds // 1000

    def teardown(self) -> None:
        self.do(self.connection.close())
        self.loop.close()

    @rule(
        queue_class=st.sampled_from(sorted(CLASSES)),
        blocks=st.integers(1, 16),
        tenant=st.sampled_from(("a", "ab", "b")),
        priority=st.sampled_from((-10, 0, 10)),
        max_wait_s=st.sampled_from((None, None, None, 0.0)),
        again=st.booleans(),
        num_choices=st.integers(1, 3),
    )
    def admit(self, queue_class, blocks, tenant, priority, max_wait_s, again, num_choices) -> None:
        name = str(self.count)
        self.count += 1
        wanted = ticket(
            name,
            queue_class=queue_class,
            prompt_tokens=blocks * 16,
            tenant=tenant,
            priority=priority,
            max_wait_s=max_wait_s,
            num_choices=num_choices,
            request_id=f"r-{int(name) - 1}" if again else f"r-{name}",
        )
        limits, fields = CLASSES[queue_class], json.dumps(encode_ticket(wanted, "g1"))
        before_ms = self.redis_ms()
        reply = self.call("admit", f"a-{name}", fields, LEASE_MS, limits.max_waiting, limits.max_waiting_tokens, 0)
        if reply[0] == "late":  # how late, and so whether, depends on their time, which this reply does not tell
            moments = range(before_ms, self.redis_ms() + 1)
            assert any(deepcopy(self.twin).admit(wanted, at_ms) == Refused("late", reply[1]) for at_ms in moments)
            return
        # The scripts' own time, where they tell it; other refusals do not depend on it.
        self.now_ms = int(reply[3]) if reply[0] == "admitted" else self.now_ms
        ours = self.twin.admit(wanted, self.now_ms)
        if reply[0] == "admitted":
            assert ours == Admitted(reply[1], reply[4])
            self.blocks[f"a-{name}"] = blocks
        elif reply[0] == "full":
            assert ours == Refused(reply[1], reply[3])
        else:
            assert isinstance(ours, Refused)
            assert ours.why == reply[0]

    @rule(pair=PAIRS, data=st.data())
    @precondition(lambda self: self.blocks)
    def grant(self, pair, data) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.blocks)))
        self.grant_to(attempt, pair)

    @rule(pair=PAIRS, data=st.data())
    def grant_a_head(self, pair, data) -> None:
        if heads := self.twin.snapshot(self.now_ms).heads:
            self.grant_to(data.draw(st.sampled_from([head.ticket.attempt_id for head in heads])), pair)

    def grant_to(self, attempt: str, pair: tuple[str, str]) -> None:
        route = self.route(attempt, pair)
        entry = self.twin._entries[attempt].ticket
        limits, is_granted = CLASSES[entry.queue_class], attempt in self.twin._grants
        most = -1 if limits.max_prefills is None else limits.max_prefills
        args = (
            attempt,
            *pair,
            route.prefill_blocks,
            route.decode_blocks,
            most,
            limits.weight,
            0,
            "g1",
            "x:",
            route.prefill_tokens,
        )
        status, *_ = self.call("grant", *args)
        if is_granted:  # the scripts repeat what they said
            assert status == "granted"
            return
        if status == "granted":
            granted_at = self.do(self.connection.commands.hget(LOAD, f"granted_at:{entry.queue_class}"))
            self.now_ms = int(granted_at)
        elif entry.max_wait_s == 0.0:
            self.now_ms += 1  # it may have expired in between: both end it
            self.call("release", "all", attempt)
            self.twin.end(attempt)
            del self.blocks[attempt]
            return
        assert self.twin.grant(attempt, route, self.now_ms) == status

    @rule(pair=PAIRS, data=st.data())
    @precondition(lambda self: self.blocks)
    def reserve(self, pair, data) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.blocks)))
        route = self.route(attempt, pair)
        self.call("reserve", attempt, *pair, route.prefill_blocks, route.decode_blocks, 0)
        self.twin.reserve(attempt, route, -(10**9), self.now_ms)

    @rule(what=st.sampled_from(("prefill", "all")), data=st.data())
    @precondition(lambda self: self.blocks)
    def release(self, what, data) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.blocks)))
        self.call("release", what, attempt)
        if what == "all":
            self.twin.end(attempt)
            del self.blocks[attempt]
        else:
            self.twin.release_prefill(attempt)

    def route(self, attempt: str, pair: tuple[str, str]) -> Route:
        blocks = self.blocks[attempt]
        return Route(
            prefill_id=pair[0],
            decode_id=pair[1],
            prefill_blocks=blocks,
            decode_blocks=blocks,
            prefill_tokens=9 * blocks,
        )

    @invariant()
    def both_see_the_same(self) -> None:
        theirs, ours = decode_snapshot(self.call("renew", LEASE_MS)[3]), self.twin.snapshot(self.now_ms)
        assert theirs is not None
        assert theirs.reservation == ours.reservation
        assert [(head.ticket.attempt_id, head.num_prefills) for head in theirs.heads] == [
            (head.ticket.attempt_id, head.num_prefills) for head in ours.heads
        ]
        assert [head.turn for head in theirs.heads] == pytest.approx([head.turn for head in ours.heads], abs=1e-4)
        assert [self.held(view) for view in theirs.views] == [self.held(view) for view in ours.views]

    @staticmethod
    def held(view: WorkerView) -> tuple[str, int, int, int]:
        return view.record.worker_id, view.granted_blocks, view.granted_seqs, view.granted_tokens


def test_scripts_and_twin_answer_alike(redis_server: EmbeddedRedis):
    machine = type("Machine", (TwinMachine,), {"url": redis_server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_the_twin_keeps_the_pace_of_a_class_as_the_scripts_write_it():
    """In thousandths: here the mean of the intervals is 14.99968 ms, which they write as 15.000."""
    twin, now_ms = QueueTwin(CLASSES), 1_000_000
    for worker in WORKERS:
        twin.register(worker)
    route = Route(prefill_id="p1", decode_id="d1", prefill_blocks=1, decode_blocks=1)
    for interval_ms in (12, 6, 10, 29, 4, 26):
        twin.admit(ticket("served"), now_ms)
        now_ms += interval_ms
        assert twin.grant("a-served", route, now_ms) == "granted"
        twin.end("a-served")
    assert twin.admit(ticket("head"), now_ms) == Admitted(0, 0)
    assert twin.admit(ticket("second"), now_ms) == Admitted(1, 15)
