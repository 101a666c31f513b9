"""Deaths of gateways, workers and Redis: running places go on, and the sums are right again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from baton.coordination.client import connect
from baton.coordination.embedded import EmbeddedRedis
from baton.core.errors import AlreadyExistsError, FailedPreconditionError, StartupError, UnavailableError
from baton.core.settings import RedisSettings
from tests.fixtures.coordination import KEYS, Stage, open_stage, record, ticket

if TYPE_CHECKING:
    from tests.fixtures.redis import PrivateRedis


async def granted_is(queue, **expected: int) -> bool:
    return {view.record.worker_id: view.granted_seqs for view in await queue.workers()} == expected


async def nobody_waits(queue) -> bool:
    return all(row.num_waiting == 0 for row in await queue.status())


async def test_a_dead_gateways_tickets_come_back(stage: Stage):
    async with stage.beating("p1", "d1", max_num_seqs=1), stage.gateway("heir", lease_s=1.0) as heir:
        async with stage.gateway("dead", lease_s=1.0) as dead:
            holder = await dead.admit(ticket("1")).__aenter__()
            await holder.granted()
            await dead.admit(ticket("2")).__aenter__()
            dead._upkeep.places.clear()  # from here on it neither renews nor releases them
            async with heir.admit(ticket("3")) as place:
                async with asyncio.timeout(20):
                    await place.granted()
        await stage.eventually(lambda: nobody_waits(heir))
        await stage.assert_idle(heir)


async def test_a_silent_worker_is_out_within_seconds_and_back_with_its_credit(stage: Stage):
    async with stage.gateway() as queue, queue.admit(ticket("1")) as place:
        async with stage.beating("p1", "d1"):
            await place.granted()
        await stage.eventually(lambda: granted_is(queue), within_s=15)
        await stage.workers("p1", "d1")
        assert await granted_is(queue, p1=1, d1=1)
        assert await queue.check_integrity() == []


async def test_a_new_incarnation_frees_what_the_old_one_held(stage: Stage):
    await stage.workers("p1", "d1")
    async with stage.gateway() as queue:
        async with queue.admit(ticket("1")) as place:
            await place.granted()
            await stage.workers("d1", incarnation="i2")
            assert await granted_is(queue, p1=1, d1=0)
            assert await queue.check_integrity() == []
            with pytest.raises(FailedPreconditionError, match="another process"):
                await stage.workers("d1", incarnation="i1")
        await stage.assert_idle(queue)


async def test_a_live_worker_keeps_its_id_against_one_elsewhere(stage: Stage):
    async with stage.beating("p1", "d1"):
        async with stage.gateway() as queue, queue.admit(ticket("1")) as place:
            await place.granted()
            with pytest.raises(AlreadyExistsError, match=r"d1 is the id of a live worker at 127\.0\.0\.1:2") as refusal:
                await stage.workers("d1", incarnation="i2", address="127.0.0.1:99")
            assert refusal.value.reason == "WORKER_ID_TAKEN"
            assert await granted_is(queue, p1=1, d1=1)
        await stage.workers("d1")  # it was not replaced


async def test_the_id_of_a_silent_worker_is_free(stage: Stage):
    await stage.registry.heartbeat(record("d1"))

    async def takes_it() -> bool:
        try:
            await stage.workers("d1", incarnation="i2", address="127.0.0.1:99")
        except AlreadyExistsError:
            return False
        return True

    assert not await takes_it()
    await stage.eventually(takes_it)
    (view,) = await stage.registry.workers()
    assert view.record.address == "127.0.0.1:99"


async def test_a_deregistered_worker_stays_out(stage: Stage):
    await stage.workers("p1", "d1")
    await stage.registry.deregister("d1", "another")
    assert len(await stage.registry.workers()) == 2
    await stage.registry.deregister("d1", "i1")
    with pytest.raises(FailedPreconditionError):
        await stage.workers("d1")
    assert [view.record.worker_id for view in await stage.registry.workers()] == ["p1"]


@pytest.mark.parametrize("loss", ["flush", "restart"])
async def test_a_lost_database_is_rebuilt(private_redis: PrivateRedis, loss: str):
    async with (
        open_stage(private_redis.url) as stage,
        stage.beating("p1", "d1", max_num_seqs=2),
        stage.gateway("g1", settle_s=1.0) as one,
        stage.gateway("g2", settle_s=1.0) as two,
    ):
        async with one.admit(ticket("1")) as running, two.admit(ticket("2")) as early:
            await running.granted()
            await early.granted()
            await early.release_prefill()
            async with one.admit(ticket("3")) as third, two.admit(ticket("4")) as fourth:
                if loss == "flush":
                    assert private_redis.ask("FLUSHALL").startswith(b"+OK")
                    assert private_redis.ask("SCRIPT", "FLUSH").startswith(b"+OK")
                else:
                    private_redis.kill()
                    private_redis.start()
                await stage.eventually(lambda: rebuilt(one, 2, p1=1, d1=2))
                assert await one.check_integrity() == []
                await early.__aexit__(None, None, None)
                async with asyncio.timeout(20):
                    await third.granted()  # first in, first out, as before
                assert fourth.is_waiting
        await stage.assert_idle(one)


async def rebuilt(queue, num_waiting: int, **granted: int) -> bool:
    try:
        waiting = sum(row.num_waiting for row in await queue.status())
        return waiting == num_waiting and await granted_is(queue, **granted)
    except UnavailableError:
        return False


async def test_credit_is_not_given_away_before_all_have_put_back_theirs(private_redis: PrivateRedis):
    """After a flush one gateway is slow; the other does not grant what the slow one still runs on."""
    async with (
        open_stage(private_redis.url) as stage,
        stage.beating("p1", "d1", max_num_seqs=1),
        stage.gateway("quick", settle_s=2.5) as quick,
        stage.gateway("slow", settle_s=2.5, tick_s=1.0) as slow,
        slow.admit(ticket("1")) as running,
    ):
        await running.granted()
        async with quick.admit(ticket("2")) as waiting:
            private_redis.ask("FLUSHALL")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.5):
                    await waiting.granted()
            assert await granted_is(quick, p1=1, d1=1)


async def test_a_live_request_is_not_run_twice_right_after_a_loss(private_redis: PrivateRedis):
    """Its gateway is slow to put it back; another one is asked for the same request in the meantime."""
    async with (
        open_stage(private_redis.url) as stage,
        stage.beating("p1", "d1"),
        stage.gateway("slow", settle_s=2.0, tick_s=0.7) as slow,
        stage.gateway("quick", settle_s=2.0) as quick,
        slow.admit(ticket("1")) as running,
    ):
        await running.granted()
        private_redis.ask("FLUSHALL")
        with pytest.raises(AlreadyExistsError):
            await quick.admit(ticket("again", request_id="r-1")).__aenter__()
        async with quick.admit(ticket("2")) as other, asyncio.timeout(20):
            await other.granted()
        assert await quick.check_integrity() == []


async def test_redis_away(private_redis: PrivateRedis):
    """Admission fails at once; the running place leaves at once; then all comes back by itself."""
    async with open_stage(private_redis.url) as stage, stage.beating("p1", "d1"), stage.gateway() as queue:
        async with queue.admit(ticket("1")) as place:
            await place.granted()
            private_redis.kill()
            start_s = time.monotonic()
            with pytest.raises(UnavailableError) as refused:
                await queue.admit(ticket("2")).__aenter__()
            assert refused.value.reason == "REDIS_UNAVAILABLE"
            assert not queue.is_available
            await place.release_prefill()
        assert time.monotonic() - start_s < 15
        assert queue.num_live == 0
        private_redis.start()
        await stage.eventually(lambda: queue.is_available)
        async with queue.admit(ticket("3")) as place, asyncio.timeout(20):
            await place.granted()
        await stage.assert_idle(queue)


async def test_redis_stalls_longer_than_the_leases(private_redis: PrivateRedis):
    async with (
        open_stage(private_redis.url) as stage,
        stage.beating("p1", "d1", max_num_seqs=1),
        stage.gateway("g1", lease_s=1.0, call_timeout_s=1.0) as queue,
    ):
        place = await queue.admit(ticket("1")).__aenter__()
        await place.granted()
        async with queue.admit(ticket("2")) as waiting:
            private_redis.pause()
            start_s = time.monotonic()
            with pytest.raises(UnavailableError):
                await queue.admit(ticket("3")).__aenter__()
            assert time.monotonic() - start_s < 15
            await asyncio.sleep(1.5)
            private_redis.resume()
            await stage.eventually(lambda: rebuilt(queue, 1, p1=1, d1=1))
            assert waiting.is_waiting
            await place.__aexit__(None, None, None)
            async with asyncio.timeout(20):
                await waiting.granted()
        # What was sent into the stall, and heard of by nobody, ends by its lease.
        await stage.eventually(lambda: granted_is(queue, p1=0, d1=0))
        await stage.assert_idle(queue)


async def test_prefill_credit_is_paid_back_after_an_outage(private_redis: PrivateRedis):
    async with (
        open_stage(private_redis.url) as stage,
        stage.beating("p1", "d1"),
        stage.gateway(call_timeout_s=0.5) as queue,
        queue.admit(ticket("1")) as place,
    ):
        await place.granted()
        private_redis.pause()
        await place.release_prefill()
        private_redis.resume()
        await stage.eventually(lambda: rebuilt(queue, 0, p1=0, d1=1))
        assert await queue.check_integrity() == []


async def test_no_redis_is_one_line(private_redis: PrivateRedis):
    url = private_redis.url
    private_redis.kill()
    for wrong in (url, "redis://user:secret@127.0.0.1:1/0"):
        with pytest.raises(StartupError, match=r"redis\.url: cannot use Redis") as error:
            await connect(RedisSettings(url=wrong, socket_timeout_s=1.0), KEYS)
        assert "\n" not in str(error.value)
        assert "secret" not in str(error.value)


def test_the_embedded_server_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with EmbeddedRedis() as server:
        assert list(tmp_path.iterdir())
        assert server.returncode is None
    assert list(tmp_path.iterdir()) == []
