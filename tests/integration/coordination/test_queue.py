"""Admission, grants and releases on one healthy Redis."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from baton.coordination.limits import ClassLimits
from baton.core.errors import AlreadyExistsError, ResourceExhaustedError, UnavailableError
from baton.core.workers import Grant, Route, WorkerState
from tests.fixtures.coordination import CLASSES, KEYS, Stage, record, route, ticket

if TYPE_CHECKING:
    from baton.coordination.place import Place


async def nothing_is_granted(*places) -> None:
    """The dispatcher had its chance: one more round trip than it needs, and no grant."""
    for place in places:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await place.granted()


async def test_admits_grants_and_frees(stage: Stage):
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:
        async with queue.admit(ticket("1")) as place:
            grant = await place.granted()
            assert (place.position, grant.prefill, grant.decode) == (0, record("p1"), record("d1"))
            assert [(v.granted_blocks, v.granted_seqs) for v in await queue.workers()] == [(10, 1), (10, 1)]
            await place.release_prefill()
            await place.release_prefill()
            held = {v.record.worker_id: (v.granted_blocks, v.granted_seqs) for v in await queue.workers()}
            assert held == {"d1": (10, 1), "p1": (0, 0)}
            assert await queue.check_integrity() == []
        await stage.assert_idle(queue)
        assert queue.num_live == 0


async def test_a_class_is_first_in_first_out(stage: Stage):
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway() as queue:
        done: list[str] = []

        async def serve(name: str) -> None:
            async with queue.admit(ticket(name)) as place:
                grant = await place.granted()
                assert grant.queue_s >= 0
                done.append(name)

        async with queue.admit(ticket("first")) as first, asyncio.TaskGroup() as tasks:
            await first.granted()
            for i in range(8):
                tasks.create_task(serve(f"{i}"))
                await stage.eventually(lambda i=i: waiting_is(queue, i + 1))
            await first.__aexit__(None, None, None)
        assert done == [f"{i}" for i in range(8)]
        await stage.assert_idle(queue)


async def waiting_is(queue, count: int, name: str = "chat") -> bool:
    return next(row.num_waiting for row in await queue.status() if row.name == name) == count


async def test_position_counts_who_is_ahead(stage: Stage):
    async with stage.gateway() as queue, AsyncExitStack() as stack:
        for i in range(3):
            place = await stack.enter_async_context(queue.admit(ticket(str(i))))
            assert place.position == i
        other = await stack.enter_async_context(queue.admit(ticket("x", queue_class="long")))
        assert other.position == 0
        chat, long = await queue.status()
        assert (chat.num_waiting, chat.waiting_tokens, long.num_waiting) == (3, 480, 1)
        await asyncio.sleep(0.002)  # Redis tells the time in ms
        assert (await queue.status())[0].oldest_wait_s > 0


async def test_a_class_without_credit_blocks_no_other(stage: Stage):
    await stage.workers("p1", "d1", num_blocks=30)
    async with stage.gateway() as queue:
        big = ticket("big", queue_class="long", prompt_tokens=320)  # 20 of 30 blocks: fits, but not beside two chats
        async with queue.admit(ticket("1")) as one, queue.admit(ticket("2")) as two:
            await one.granted()
            await two.granted()
            async with queue.admit(big) as blocked, queue.admit(ticket("3")) as three:
                await three.granted()
                await nothing_is_granted(blocked)
                await three.__aexit__(None, None, None)
                await one.__aexit__(None, None, None)
                async with asyncio.timeout(20):
                    await blocked.granted()
        await stage.assert_idle(queue)


async def test_prefills_of_a_class_are_bounded(stage: Stage):
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:
        first, second = (ticket(name, queue_class="long") for name in "12")
        async with queue.admit(first) as one, queue.admit(second) as two:
            await one.granted()
            await nothing_is_granted(two)
            await one.release_prefill()
            async with asyncio.timeout(20):
                await two.granted()
        await stage.assert_idle(queue)


async def test_classes_take_turns_by_weight(stage: Stage):
    classes = {
        "chat": ClassLimits(max_waiting=50, max_waiting_tokens=99999, weight=3.0),
        "long": ClassLimits(max_waiting=50, max_waiting_tokens=99999, weight=1.0),
    }
    order: list[str] = []
    async with (
        stage.beating("p1", "d1", max_num_seqs=1),
        stage.gateway(classes=classes) as queue,
        queue.admit(ticket("hold")) as hold,
    ):
        await hold.granted()

        async def serve(name: str, queue_class: str) -> None:
            async with queue.admit(ticket(name, queue_class=queue_class)) as place:
                await place.granted()
                order.append(queue_class)

        async with asyncio.TaskGroup() as tasks:
            for i in range(12):
                tasks.create_task(serve(f"c{i}", "chat"))
                tasks.create_task(serve(f"l{i}", "long"))
            await stage.eventually(lambda: waiting_is(queue, 12))
            await stage.eventually(lambda: waiting_is(queue, 12, "long"))
            await hold.__aexit__(None, None, None)
        for turns in (8, 16):
            assert abs(order[:turns].count("chat") - turns * 3 / 4) <= 1
        await stage.assert_idle(queue)


async def test_a_tenant_with_a_thousand_requests_delays_another_by_one_turn(stage: Stage):
    classes = {"chat": ClassLimits(max_waiting=2000, max_waiting_tokens=10**6)}
    order: list[str] = []
    async with (
        stage.beating("p1", "d1", max_num_seqs=1),
        stage.gateway(classes=classes, lease_s=30.0, call_timeout_s=10.0) as queue,
        queue.admit(ticket("hold", tenant="flood")) as hold,
        asyncio.TaskGroup() as tasks,
    ):
        await hold.granted()
        flood = [queue.admit(ticket(f"f{i}", tenant="flood")) for i in range(1000)]
        for first in range(0, 1000, 50):
            await asyncio.gather(*(place.__aenter__() for place in flood[first : first + 50]))

        async def serve(tenant: str, index: int) -> None:
            async with queue.admit(ticket(f"{tenant}{index}", tenant=tenant)) as place:
                # Of each tenant that waits, one request for each of one's own.
                assert place.position == (2 * index + 1 if tenant == "calm" else 3 * index + 2)
                await place.granted()
                order.append(f"{tenant}{index}")

        for count, (tenant, index) in enumerate((t, i) for t in ("calm", "quiet") for i in range(3)):
            tasks.create_task(serve(tenant, index))
            await stage.eventually(lambda c=count: waiting_is(queue, 1001 + c))
        await hold.__aexit__(None, None, None)
        for _ in range(4):  # the flood's own turns
            await stage.eventually(lambda: bool(granted_of(queue)))
            await granted_of(queue)[0].__aexit__(None, None, None)
        await stage.eventually(lambda: len(order) == 6)
        assert order == ["calm0", "quiet0", "calm1", "quiet1", "calm2", "quiet2"]
        for first in range(0, 1000, 50):
            await asyncio.gather(*(place.__aexit__(None, None, None) for place in flood[first : first + 50]))
        await stage.assert_idle(queue)


def granted_of(queue, tenant: str = "flood") -> list:
    return [p for p in queue._upkeep.places.values() if p.ticket.tenant == tenant and not p.is_waiting]


async def test_priority_orders_the_requests_of_one_tenant_only(stage: Stage):
    await stage.workers("p1", "d1", max_num_seqs=1)
    order: list[str] = []
    async with stage.gateway() as queue, queue.admit(ticket("hold")) as hold:
        await hold.granted()

        async def serve(name: str, **fields) -> None:
            async with queue.admit(ticket(name, **fields)) as place:
                await place.granted()
                order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for i, (name, tenant, priority) in enumerate(
                [("low", "a", -10), ("mid", "a", 0), ("other", "b", -10), ("high", "a", 10), ("mid2", "a", 0)]
            ):
                tasks.create_task(serve(name, tenant=tenant, priority=priority))
                await stage.eventually(lambda i=i: waiting_is(queue, i + 1))
            await hold.__aexit__(None, None, None)
        assert order == ["high", "other", "mid", "mid2", "low"]
        await stage.assert_idle(queue)


async def test_full_is_refused_with_a_time(stage: Stage):
    async with stage.gateway() as queue, AsyncExitStack() as stack:
        for i in range(4):
            await stack.enter_async_context(queue.admit(ticket(str(i), queue_class="long")))
        with pytest.raises(ResourceExhaustedError, match="4 requests wait, the limit is 4 requests") as refused:
            await stack.enter_async_context(queue.admit(ticket("5", queue_class="long")))
        assert refused.value.retry_after_s is not None
        assert 0.1 <= refused.value.retry_after_s <= 60
        await stack.enter_async_context(queue.admit(ticket("c1", prompt_tokens=4900)))
        with pytest.raises(ResourceExhaustedError, match="the limit is 5000 prompt tokens"):
            await stack.enter_async_context(queue.admit(ticket("c2", prompt_tokens=101)))
        await stack.enter_async_context(queue.admit(ticket("c3", prompt_tokens=100)))
        assert queue.num_live == 6
        assert await queue.check_integrity() == []
    async with stage.gateway() as queue:
        await stage.assert_idle(queue)


async def test_a_tenant_that_fills_the_queue_fills_it_for_itself(stage: Stage):
    async with stage.gateway() as queue, AsyncExitStack() as stack:

        async def admit(name: str, tenant: str, tokens: int = 100) -> None:
            wanted = ticket(name, queue_class="long", tenant=tenant, prompt_tokens=tokens)
            await stack.enter_async_context(queue.admit(wanted))

        for i in range(4):
            await admit(f"f{i}", "flood", 950)
        with pytest.raises(ResourceExhaustedError, match="limit is 4 requests"):
            await admit("f4", "flood")
        await admit("c0", "calm", 2000)
        with pytest.raises(ResourceExhaustedError, match="limit is 4000 prompt tokens"):
            await admit("big", "calm", 201)
        await admit("q0", "quiet", 100)
        with pytest.raises(ResourceExhaustedError):
            await admit("q1", "quiet", 100)  # a third of four is one
        assert await queue.check_integrity() == []


async def test_a_live_request_is_not_run_twice(stage: Stage):
    async with stage.gateway("g1") as mine, stage.gateway("g2") as other, mine.admit(ticket("1")):
        for queue in (mine, other):
            with pytest.raises(AlreadyExistsError, match="r-1"):
                await queue.admit(ticket("again", request_id="r-1")).__aenter__()
        assert await waiting_is(other, 1)
        assert await mine.check_integrity() == []
    async with stage.gateway("g3") as queue, queue.admit(ticket("2", request_id="r-1")) as place:
        assert place.position == 0


async def test_a_repeated_command_charges_once(stage: Stage):
    """What the client library does when a connection breaks after the script ran."""
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:
        commands = queue._commands
        once = commands.call

        async def twice(name: str, *args):
            await once(name, *args)
            return await once(name, *args)

        commands.call = twice
        async with queue.admit(ticket("1")) as place:
            await place.granted()
            assert [(v.granted_blocks, v.granted_seqs) for v in await queue.workers()] == [(10, 1), (10, 1)]
            await place.release_prefill()
            assert await queue.check_integrity() == []
        await stage.assert_idle(queue)


async def test_two_gateways_share_a_queue(stage: Stage):
    """The one that frees credit grants it to the other's head, which hears of it at once."""
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with (
        stage.gateway("g1", tick_s=30.0, lease_s=90.0) as one,
        stage.gateway("g2", tick_s=30.0, lease_s=90.0) as two,
        two.admit(ticket("2")) as held,
    ):
        await held.granted()
        async with one.admit(ticket("1")) as waiting:
            await nothing_is_granted(waiting)
            await held.__aexit__(None, None, None)
            async with asyncio.timeout(15):
                await waiting.granted()
        await stage.assert_idle(one)


async def test_credit_is_never_given_twice(stage: Stage):
    """Four gateways fight for little credit."""
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    is_shared = asyncio.Event()

    async def serve(queue, name: str) -> None:
        async with queue.admit(ticket(name)) as place:
            grant: Grant = await place.granted()
            for worker in (grant.prefill.worker_id, grant.decode.worker_id):
                running[worker] = running.get(worker, 0) + 1
                peak[worker] = max(peak.get(worker, 0), running[worker])
            if max(running.values()) == 2:
                is_shared.set()
            await is_shared.wait()
            await asyncio.sleep(0.01)  # the work
            for worker in (grant.prefill.worker_id, grant.decode.worker_id):
                running[worker] -= 1

    async with stage.beating("p1", "p2", "d1", "d2", max_num_seqs=2, num_blocks=25), AsyncExitStack() as stack:
        queues = [await stack.enter_async_context(stage.gateway(f"g{i}", tick_s=0.5)) for i in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for i in range(30):
                tasks.create_task(serve(queues[i % 4], str(i)))
        assert max(peak.values()) == 2
        await stage.assert_idle(queues[0])


async def test_a_heartbeat_wakes_the_queue(stage: Stage):
    async with stage.gateway(tick_s=30.0, lease_s=90.0) as queue, queue.admit(ticket("1")) as place:
        await stage.workers("p1")
        await nothing_is_granted(place)
        await stage.workers("d1", state=WorkerState.DRAINING)
        await nothing_is_granted(place)
        await stage.workers("d1")
        async with asyncio.timeout(15):
            await place.granted()


async def test_the_script_checks_what_the_route_chose(stage: Stage):
    """A route that sees credit where there is none gets nothing, and does not spin."""
    calls = 0

    def careless(wanted, views):
        nonlocal calls
        calls += 1
        return Route(prefill_id="p1", decode_id="d1", prefill_blocks=101, decode_blocks=1)

    await stage.workers("p1", "d1")
    async with stage.gateway(route=careless, tick_s=30.0, lease_s=90.0) as queue, queue.admit(ticket("1")) as place:
        await stage.eventually(lambda: calls)
        await nothing_is_granted(place)
        assert calls <= 6
        assert await queue.check_integrity() == []


@pytest.mark.parametrize("rounds", range(12))
async def test_cancelling_at_any_point_frees_once(stage: Stage, rounds: int):
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:

        async def serve() -> None:
            async with queue.admit(ticket("1")) as place:
                await place.granted()
                await place.release_prefill()

        task = asyncio.create_task(serve())
        for _ in range(rounds):
            await asyncio.sleep(0.0004)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stage.assert_idle(queue)
        async with queue.admit(ticket("2", request_id="r-1")) as place:
            await place.granted()


async def test_ending_the_queue_frees_what_it_holds(stage: Stage):
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway("g1") as watcher:
        async with stage.gateway("g2") as queue:
            granted = await queue.admit(ticket("1")).__aenter__()
            await granted.granted()
            waiting = await queue.admit(ticket("2")).__aenter__()
        with pytest.raises(UnavailableError):
            await waiting.granted()
        await granted.__aexit__(None, None, None)
        await stage.assert_idle(watcher)
        with pytest.raises(UnavailableError):
            await queue.admit(ticket("3")).__aenter__()


async def test_classes_that_only_others_know_are_left_to_them(stage: Stage):
    await stage.workers("p1", "d1")
    only_long = {"long": CLASSES["long"]}
    async with stage.gateway("g1", classes=only_long) as narrow, stage.gateway("g2") as wide:
        async with wide.admit(ticket("c")) as chat, narrow.admit(ticket("l", queue_class="long")) as long:
            await chat.granted()
            await long.granted()
        await stage.assert_idle(narrow)


@pytest.mark.parametrize("reserve_after_s", [0.2, 60.0])
async def test_small_load_does_not_starve_a_big_head(stage: Stage, reserve_after_s: float):
    """Three chats of 10 blocks run and more wait: of 30 blocks 20 are never free at once unless they are kept."""
    async with (
        stage.beating("p1", "d1", num_blocks=30),
        stage.gateway(reserve_after_s=reserve_after_s) as queue,
        AsyncExitStack() as stack,
    ):
        chats = [await stack.enter_async_context(queue.admit(ticket(f"c{i}"))) for i in range(5)]
        for chat in chats[:3]:
            await chat.granted()
        big = await stack.enter_async_context(queue.admit(ticket("big", queue_class="long", prompt_tokens=320)))

        def running() -> list[Place]:
            return [chat for chat in chats if not chat.is_waiting]

        async def is_kept() -> bool:
            return await stage.connection.commands.hexists(KEYS.all[10], "reserved")

        async def three_run_or_it_is_kept() -> bool:
            return len(running()) == 3 or await is_kept()

        index = 5
        while index < 40 if reserve_after_s > 1 else not await is_kept():
            oldest = running()[0]
            await oldest.__aexit__(None, None, None)
            chats.remove(oldest)
            chats.append(await stack.enter_async_context(queue.admit(ticket(f"c{index}"))))
            await stage.eventually(three_run_or_it_is_kept)
            index += 1
        assert big.is_waiting
        if reserve_after_s < 1:
            for chat in running()[:2]:
                await chat.__aexit__(None, None, None)
            async with asyncio.timeout(20):
                assert (await big.granted()).queue_s >= 0.2
        assert await queue.check_integrity() == []


async def test_what_is_kept_is_one_pairs_and_ends_with_its_ticket(stage: Stage):
    """Others run on the rest of the pair and on other pairs; when the ticket leaves, all is free again."""
    await stage.workers("p1", "d1", num_blocks=30)
    big = ticket("big", queue_class="long", prompt_tokens=480)
    async with stage.gateway(reserve_after_s=0.1) as queue, queue.admit(ticket("1")) as running:
        await running.granted()
        async with queue.admit(big) as place:
            await stage.eventually(lambda: stage.connection.commands.hget(KEYS.all[10], "reserved"))
            async with queue.admit(ticket("2")) as chat:
                await nothing_is_granted(place, chat)
                await stage.workers("p2", "d2", num_blocks=20)
                async with asyncio.timeout(20):
                    grant = await chat.granted()
                assert (grant.prefill.worker_id, grant.decode.worker_id) == ("p2", "d2")
                await nothing_is_granted(place)
        async with queue.admit(ticket("3")) as chat, asyncio.timeout(20):
            await chat.granted()
    async with stage.gateway() as queue:
        await stage.assert_idle(queue)


async def test_the_wait_is_predicted_by_what_is_ahead(stage: Stage):
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway() as queue, AsyncExitStack() as stack:
        running = await stack.enter_async_context(queue.admit(ticket("0")))
        assert running.predicted_wait_s == 0
        await running.granted()
        await stage.connection.commands.hset(KEYS.all[10], mapping={"interval:chat": "20000", "granted_at:chat": "0"})
        waiting = [await stack.enter_async_context(queue.admit(ticket(str(i)))) for i in (1, 2, 3)]
        assert [place.predicted_wait_s for place in waiting] == [0, 20, 40]
        late = ticket("late", max_wait_s=55.5)
        with pytest.raises(
            ResourceExhaustedError, match=r"a wait of about 60 s, the request can wait 55\.5 s"
        ) as refused:
            await queue.admit(late).__aenter__()
        assert refused.value.reason == "DEADLINE_UNMEETABLE"
        assert 4.5 <= refused.value.retry_after_s <= 5.7
        await stack.enter_async_context(queue.admit(ticket("in time", max_wait_s=65)))
        # Another class is not concerned, nor is a tenant whose turn comes sooner.
        await stack.enter_async_context(queue.admit(ticket("other", queue_class="long", max_wait_s=0.1)))
        await stack.enter_async_context(queue.admit(ticket("new", tenant="new", max_wait_s=25)))


async def test_the_measured_rate_is_the_prediction(stage: Stage):
    """Requests that take 50 ms each, one at a time: the prediction of the last of a queue comes close to its wait."""
    errors, admitted = [], []
    async with stage.beating("p1", "d1", max_num_seqs=1), stage.gateway() as queue:

        async def fewer_than_eight_wait() -> bool:
            return (await queue.status())[0].num_waiting < 8

        async def serve(name: str) -> None:
            async with queue.admit(ticket(name)) as place:
                admitted.append(name)
                grant = await place.granted()
                if place.predicted_wait_s is not None and place.position >= 5:
                    errors.append(place.predicted_wait_s / grant.queue_s)
                await asyncio.sleep(0.05)  # the work

        async with asyncio.TaskGroup() as tasks:
            for i in range(30):  # always eight that wait
                tasks.create_task(serve(str(i)))
                await stage.eventually(lambda i=i: len(admitted) > i)
                await stage.eventually(fewer_than_eight_wait)
        assert len(errors) >= 10
        errors.sort()
        assert 0.3 < errors[len(errors) // 2] < 3.0


async def test_what_has_waited_too_long_is_not_granted(stage: Stage):
    """Its gateway is stuck and does not take it back: the script drops it before it costs credit."""
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway(tick_s=30.0, lease_s=90.0) as queue, queue.admit(ticket("1")) as running:
        await running.granted()
        async with queue.admit(ticket("2", max_wait_s=0.1)) as expired, queue.admit(ticket("3")) as next_one:
            await asyncio.sleep(0.15)
            await running.__aexit__(None, None, None)
            async with asyncio.timeout(20):
                await next_one.granted()
            assert expired.is_waiting
            assert not await stage.connection.commands.hexists(KEYS.all[5], "a-2")
            assert await queue.check_integrity() == []


async def test_another_attempt_goes_before_all_who_came_later(stage: Stage):
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway() as queue, AsyncExitStack() as places:
        first = await places.enter_async_context(queue.admit(ticket("1")))
        await first.granted()
        later = await places.enter_async_context(queue.admit(ticket("2")))
        again = queue.readmit(first, ticket("1", attempt_id="a-1b", prompt_tokens=170))
        await places.enter_async_context(again)
        assert (await again.granted()).attempt_id == "a-1b"
        assert again.position == 0
        await nothing_is_granted(later)
        assert [(v.granted_blocks, v.granted_seqs) for v in await queue.workers()] == [(11, 1), (11, 1)]
        assert await queue.check_integrity() == []
        # The former place holds nothing any more: leaving it takes nothing away.
        await first.__aexit__(None, None, None)
        assert queue.num_live == 2
        with pytest.raises(AlreadyExistsError):
            await queue.admit(ticket("1", attempt_id="a-1c")).__aenter__()
        await again.__aexit__(None, None, None)
        await later.granted()


async def test_another_attempt_is_not_refused_by_a_full_queue_and_counts_in_it(stage: Stage):
    limits = {"chat": ClassLimits(max_waiting=1, max_waiting_tokens=5000)}
    await stage.workers("p1", "d1", max_num_seqs=1)
    async with stage.gateway(classes=limits) as queue, AsyncExitStack() as places:
        first = await places.enter_async_context(queue.admit(ticket("1")))
        await first.granted()
        await stage.workers("p1", "d1", max_num_seqs=1, state=WorkerState.DRAINING)
        await places.enter_async_context(queue.admit(ticket("2")))
        again = await places.enter_async_context(queue.readmit(first, ticket("1", attempt_id="a-1b")))
        assert again.position == 0
        with pytest.raises(ResourceExhaustedError, match="2 requests wait"):
            await queue.admit(ticket("3")).__aenter__()


async def test_a_new_attempt_that_is_cancelled_while_it_is_admitted_leaves_nothing(stage: Stage):
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:
        async with queue.admit(ticket("1")) as first:
            await first.granted()
            entering = asyncio.create_task(queue.readmit(first, ticket("1", attempt_id="a-1b")).__aenter__())
            await asyncio.sleep(0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
        await stage.assert_idle(queue)
        assert queue.num_live == 0


async def test_what_a_ticket_avoids_reaches_every_gateways_routing(stage: Stage):
    seen: list[frozenset[str]] = []

    def choose(wanted, views):
        seen.append(wanted.avoids)
        return route(wanted, [view for view in views if view.record.incarnation not in wanted.avoids])

    await stage.workers("p1", "d1", "d2")
    await stage.workers("d1", incarnation="i2")
    async with stage.gateway(route=choose) as queue:
        async with queue.admit(ticket("1", avoids=frozenset({"i2"}))) as place:
            assert (await place.granted()).decode.worker_id == "d2"
        assert set(seen) == {frozenset({"i2"})}
