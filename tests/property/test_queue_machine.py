"""Admissions, grants, releases, deaths and losses in any order: the sums agree and every ticket ends once."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from baton.coordination.client import connect
from baton.coordination.commands import Commands
from baton.coordination.wire import decode_snapshot, encode_record, encode_ticket
from tests.fixtures.coordination import KEYS, record, ticket

if TYPE_CHECKING:
    from baton.coordination.embedded import EmbeddedRedis

BEATS, CREDIT, TICKETS, GRANTS, LEASES, LOAD = (KEYS.all[at] for at in (2, 4, 5, 8, 9, 10))
BLOCKS, SEQS, MAX_PREFILLS, MAX_WAITING = 30, 3, 2, 4
WORKERS = ("p1", "p2", "d1", "d2")
CLASSES = ("chat", "long")
TENANTS = ("a", "ab", "b")
PRIORITIES = (-10, 0, 3)
LEASE_MS = 600_000


class QueueMachine(RuleBasedStateMachine):
    """Drives the scripts as several gateways would, beside a model of what must come of it."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connection = self.do(connect(SimpleNamespace(url=self.url, socket_timeout_s=60.0), KEYS))
        self.do(self.connection.commands.flushall())
        self.commands = Commands(self.connection, KEYS, timeout_s=60.0)
        self.incarnations = dict.fromkeys(WORKERS, 0)
        self.count = 0
        self.waiting: dict[str, dict[str, Any]] = {}
        self.granted: dict[str, dict[str, Any]] = {}
        self.turns: dict[str, list[str]] = {name: [] for name in CLASSES}
        self.kept: tuple[str, str, str, int] | None = None
        for worker_id in WORKERS:
            self.beat(worker_id)

    def do(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def call(self, name: str, *args: Any) -> Any:
        return self.do(self.commands.call(name, *args))

    def beat(self, worker_id: str) -> None:
        incarnation = f"i{self.incarnations[worker_id]}"
        raw = encode_record(record(worker_id, incarnation=incarnation, num_blocks=BLOCKS, max_num_seqs=SEQS))
        assert self.call("heartbeat", worker_id, incarnation, raw, KEYS.wake_channel) == 1
        # Here workers die only where a rule says so: however long this test is held up, this one has beaten lately.
        self.do(self.connection.commands.zadd(BEATS, {worker_id: in_an_hour_ms()}))

    def teardown(self) -> None:
        self.end(sorted(self.waiting | self.granted))
        self.sums_agree()
        assert self.do(self.connection.commands.exists(CREDIT, TICKETS, GRANTS, LEASES)) == 0
        self.do(self.connection.close())
        self.loop.close()

    def end(self, attempts: list[str]) -> None:
        self.call("release", "all", *attempts)
        for attempt in attempts:
            self.forget(attempt)

    def forget(self, attempt: str) -> None:
        """The ticket has left the queue, or ended."""
        self.granted.pop(attempt, None)
        if entry := self.waiting.pop(attempt, None):
            name, tenant = entry["ticket"]["class"], entry["ticket"]["tenant"]
            if not self.served_next(name, tenant):
                self.turns[name].remove(tenant)

    def served_next(self, queue_class: str, tenant: str) -> list[str]:
        """The waiting tickets of one tenant, the next one first."""
        mine = [
            (-entry["ticket"]["priority"], entry["ticket"]["order"], attempt)
            for attempt, entry in self.waiting.items()
            if (entry["ticket"]["class"], entry["ticket"]["tenant"]) == (queue_class, tenant)
        ]
        return [attempt for _, _, attempt in sorted(mine)]

    def service_order(self, queue_class: str) -> list[str]:
        """All waiting tickets of a class as they would be served if nobody came or left: a round of turns at a time."""
        left = {tenant: self.served_next(queue_class, tenant) for tenant in self.turns[queue_class]}
        order = []
        while any(left.values()):
            order += [tickets.pop(0) for tickets in left.values() if tickets]
        return order

    @rule(
        queue_class=st.sampled_from(CLASSES),
        blocks=st.integers(1, 12),
        tenant=st.sampled_from(TENANTS),
        priority=st.sampled_from(PRIORITIES),
        repeat=st.booleans(),
    )
    def admit(self, queue_class: str, blocks: int, tenant: str, priority: int, repeat: bool) -> None:
        name = str(self.count)
        self.count += 1
        wanted = ticket(name, queue_class=queue_class, prompt_tokens=blocks * 16, tenant=tenant, priority=priority)
        fields = encode_ticket(wanted, "g1")
        num_waiting = len(self.service_order(queue_class))
        reply = self.call("admit", f"a-{name}", json.dumps(fields), LEASE_MS, MAX_WAITING, 100_000, 0)
        own = len(self.served_next(queue_class, tenant))
        num_tenants = len({*self.turns[queue_class], tenant})
        has_own_room = num_tenants > 1 and own < MAX_WAITING // num_tenants
        if num_waiting >= MAX_WAITING * (1 + has_own_room):
            assert reply[:3] == ["full", "requests", num_waiting]
            return
        restored = {"attempt_id": f"a-{name}", "ticket": fields | {"order": int(reply[2]), "since": int(reply[3])}}
        self.waiting[f"a-{name}"] = restored
        if tenant not in self.turns[queue_class]:
            self.turns[queue_class].append(tenant)
        ahead = self.service_order(queue_class).index(f"a-{name}")
        assert reply[:2] == ["admitted", ahead]
        if repeat:
            again = self.call("admit", f"a-{name}", json.dumps(fields), LEASE_MS, MAX_WAITING, 100_000, 0)
            assert again[:4] == ["admitted", ahead, *reply[2:4]]
        twin = json.dumps(fields)
        assert self.call("admit", f"twin-{name}", twin, LEASE_MS, MAX_WAITING, 100_000, 0) == ["exists"]

    @rule(prefill=st.sampled_from(("p1", "p2")), decode=st.sampled_from(("d1", "d2")), data=st.data())
    @precondition(lambda self: self.waiting)
    def grant(self, prefill: str, decode: str, data: st.DataObject) -> None:
        """Tries a ticket that may or may not be a head, on a pair that may or may not have credit."""
        attempt = data.draw(st.sampled_from(sorted(self.waiting)))
        entry = self.waiting[attempt]
        queue_class, blocks = entry["ticket"]["class"], entry["ticket"]["prompt_tokens"] // 16
        args = (
            attempt,
            prefill,
            decode,
            blocks,
            blocks,
            MAX_PREFILLS,
            1.0,
            0,
            "g1",
            KEYS.gateway_channel(""),
            7 * blocks,
        )
        first = self.service_order(queue_class)[0]
        prefills = sum(g["prefill"]["held"] and g["class"] == queue_class for g in self.grants())
        others = self.kept_for_others(attempt)
        fits = all(
            self.held(w)[0] + others.get(w, 0) + blocks <= BLOCKS and self.held(w)[1] + (w in others) < SEQS
            for w in (prefill, decode)
        )
        expected = "stale" if first != attempt else "prefills" if prefills >= MAX_PREFILLS else "credit"
        if first == attempt and prefills < MAX_PREFILLS and fits:
            expected = "granted"
        status, rest, *_ = self.call("grant", *args)
        assert status == expected
        if status == "granted":
            assert self.call("grant", *args)[0] == "granted"  # a repeated command charges once
            self.forget(attempt)
            if (tenant := entry["ticket"]["tenant"]) in self.turns[queue_class]:  # to the end of the round
                self.turns[queue_class].remove(tenant)
                self.turns[queue_class].append(tenant)
            self.granted[attempt] = entry | {
                "grant": {
                    "class": queue_class,
                    "queue_ms": 0,
                    "prefill": self.side(prefill, blocks, 7 * blocks),
                    "decode": self.side(decode, blocks, 0),
                }
            }
        snapshot = decode_snapshot(rest)
        heads = [head.ticket.attempt_id for head in snapshot.heads] if snapshot else []
        assert heads == [self.service_order(name)[0] for name in CLASSES if self.turns[name]]

    @rule(prefill=st.sampled_from(("p1", "p2")), decode=st.sampled_from(("d1", "d2")), data=st.data())
    @precondition(lambda self: self.waiting)
    def reserve(self, prefill: str, decode: str, data: st.DataObject) -> None:
        """Asks for credit to be kept, for a ticket that may or may not be a head."""
        attempt = data.draw(st.sampled_from(sorted(self.waiting)))
        blocks = self.waiting[attempt]["ticket"]["prompt_tokens"] // 16
        snapshot = decode_snapshot(self.call("reserve", attempt, prefill, decode, blocks, blocks, 0))
        if not self.is_kept() and attempt == self.service_order(self.waiting[attempt]["ticket"]["class"])[0]:
            self.kept = (attempt, prefill, decode, blocks)
        found = snapshot.reservation if snapshot else None
        assert (found.attempt_id if found else None) == (self.kept[0] if self.is_kept() else None)

    def is_kept(self) -> bool:
        """Whether the ticket that credit is kept for is still its class's head."""
        if self.kept and self.kept[0] in self.waiting:
            queue_class = self.waiting[self.kept[0]]["ticket"]["class"]
            if self.service_order(queue_class)[0] == self.kept[0]:
                return True
        self.kept = None
        return False

    def kept_for_others(self, attempt: str) -> dict[str, int]:
        if not self.is_kept() or self.kept[0] == attempt:
            return {}
        _, prefill, decode, blocks = self.kept
        return {prefill: blocks, decode: blocks}

    @rule(data=st.data())
    @precondition(lambda self: self.granted)
    def end_prefill(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.granted)))
        self.call("release", "prefill", attempt)
        self.granted[attempt]["grant"]["prefill"]["held"] = False

    @rule(data=st.data(), blocks=st.integers(1, 12), repeat=st.booleans())
    @precondition(lambda self: self.granted)
    def try_again(self, data: st.DataObject, blocks: int, repeat: bool) -> None:
        """A granted worker died: another attempt takes the place that this one had in the queue."""
        former = data.draw(st.sampled_from(sorted(self.granted)))
        attempt = f"again-{self.count}"
        self.count += 1
        ticket = self.granted[former]["ticket"] | {"prompt_tokens": blocks * 16}
        reply = self.call("readmit", former, attempt, json.dumps(ticket), LEASE_MS)
        self.forget(former)
        self.waiting[attempt] = {"attempt_id": attempt, "ticket": ticket | {"since": int(reply[3])}}
        name, tenant = ticket["class"], ticket["tenant"]
        seats = self.do(self.connection.commands.hgetall(KEYS.all[11]))
        assert int(seats[f"{name}|{tenant}"]) <= ticket["order"]
        if tenant not in self.turns[name]:
            self.turns[name].append(tenant)
        self.turns[name].sort(key=lambda each: (int(seats[f"{name}|{each}"]), each))
        ahead = self.service_order(name).index(attempt)
        assert reply[:3] == ["admitted", ahead, str(ticket["order"])]
        if repeat:
            assert self.call("readmit", former, attempt, json.dumps(ticket), LEASE_MS)[:4] == reply[:4]

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.granted)
    def leave(self, data: st.DataObject) -> None:
        self.end([data.draw(st.sampled_from(sorted(self.waiting | self.granted)))])

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.granted)
    def lose_a_lease(self, data: st.DataObject) -> None:
        """Its gateway died: the next one that renews ends it."""
        attempt = data.draw(st.sampled_from(sorted(self.waiting | self.granted)))
        # Not after a standstill, not even if this test is held up now.
        self.do(self.connection.commands.hset(LOAD, mapping={"swept": in_an_hour_ms(), "hold": 0}))
        self.do(self.connection.commands.zadd(LEASES, {attempt: 1}))
        self.call("renew", LEASE_MS)
        self.forget(attempt)

    @rule(worker_id=st.sampled_from(WORKERS))
    def restart_a_worker(self, worker_id: str) -> None:
        self.incarnations[worker_id] += 1
        self.beat(worker_id)
        for grant in self.grants():
            for side in (grant["prefill"], grant["decode"]):
                side["held"] = side["held"] and side["id"] != worker_id

    @rule(workers_first=st.booleans())
    def lose_the_database(self, workers_first: bool) -> None:
        self.kept = None
        self.do(self.connection.commands.flushall())
        self.do(self.connection.commands.script_flush())
        if workers_first:
            for worker_id in WORKERS:
                self.beat(worker_id)
        everything = self.waiting | self.granted
        unknown, *_ = self.call("renew", LEASE_MS, *[part for attempt in everything for part in (attempt, 1)])
        assert sorted(unknown) == sorted(everything)
        for _ in range(2):
            self.call("restore", LEASE_MS, json.dumps(list(everything.values())))
        for worker_id in WORKERS:
            self.beat(worker_id)
        for name in CLASSES:  # who has waited longest is first
            oldest = {
                tenant: min(self.waiting[attempt]["ticket"]["order"] for attempt in self.served_next(name, tenant))
                for tenant in self.turns[name]
            }
            self.turns[name].sort(key=lambda tenant: (oldest[tenant], tenant))

    def side(self, worker_id: str, blocks: int, tokens: int) -> dict[str, Any]:
        incarnation = f"i{self.incarnations[worker_id]}"
        return {"id": worker_id, "incarnation": incarnation, "blocks": blocks, "tokens": tokens, "held": True}

    def grants(self) -> list[dict[str, Any]]:
        return [entry["grant"] for entry in self.granted.values()]

    def held(self, worker_id: str) -> tuple[int, int, int]:
        sides = [side for grant in self.grants() for side in (grant["prefill"], grant["decode"])]
        held = [side for side in sides if side["id"] == worker_id and side["held"]]
        return sum(side["blocks"] for side in held), len(held), sum(side["tokens"] for side in held)

    @invariant()
    def sums_agree(self) -> None:
        assert self.call("audit") == []
        rows = self.call("workers")
        assert [tuple(row[2:]) for row in rows] == [self.held(worker_id) for worker_id in sorted(WORKERS)]
        assert set(self.do(self.connection.commands.hkeys(TICKETS))) == set(self.waiting) | set(self.granted)
        for waiting, *_ in self.call("status", *CLASSES):
            assert waiting <= 2 * MAX_WAITING


def in_an_hour_ms() -> int:
    return round((time.time() + 3600) * 1000)


def test_sums_agree_whatever_happens(redis_server: EmbeddedRedis):
    machine = type("Machine", (QueueMachine,), {"url": redis_server.url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=10, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
