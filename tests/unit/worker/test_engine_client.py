from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import AlreadyExistsError, ServingError
from baton.engine.process import EngineDiedError
from baton.worker.engine_client import EngineClient
from baton.worker.engine_loop import EngineStats, EventBatch


@dataclass(frozen=True)
class Event:
    attempt_id: str
    is_last: bool = False


class FakeProcess:
    """An engine process whose batches, and whose death, the test gives."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self._batches: asyncio.Queue[list[EventBatch] | Exception] = asyncio.Queue(maxsize=16)

    def send(self, command, *, is_control=False):
        self.sent.append(command)

    def give(self, *events: Event, num_commands: int = 0, **stats: int) -> None:
        batch = EventBatch(events=events, num_commands=num_commands, stats=EngineStats(**stats), step=None)
        self._batches.put_nowait([batch])

    def die(self) -> None:
        self._batches.put_nowait(EngineDiedError("engine", -9))

    async def events(self):
        while True:
            item = await self._batches.get()
            if isinstance(item, Exception):
                raise item
            yield item


class Bench:
    def __init__(self) -> None:
        self.process = FakeProcess()
        self.clock = ManualClock()
        self.client: EngineClient[Event] = EngineClient(self.process, self.clock)


@pytest.fixture
async def bench():
    bench = Bench()
    running = asyncio.create_task(bench.client.run())
    yield bench
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_events_reach_their_attempt_in_order(bench):
    first, second = bench.client.start("a", "submit a"), bench.client.start("b", "submit b")
    bench.process.give(Event("b"), Event("a"), Event("b", is_last=True))
    assert [await second.next_event(), await second.next_event()] == [Event("b"), Event("b", is_last=True)]
    assert await first.next_event() == Event("a")
    assert (second.is_over, first.is_over) == (True, False)
    assert bench.client.num_attempts == 1


async def test_an_id_is_taken_until_the_last_event_also_when_nobody_reads(bench):
    bench.client.start("a", "submit")
    with pytest.raises(AlreadyExistsError):
        bench.client.start("a", "again")
    assert bench.process.sent == ["submit"]
    bench.process.give(Event("a", is_last=True))
    await bench.client.wait_all_over()
    bench.client.start("a", "again")


async def test_death_reaches_every_attempt_after_what_it_had_still_said(bench):
    told, silent = bench.client.start("a", "submit"), bench.client.start("b", "submit")
    bench.process.give(Event("a"))
    bench.process.die()
    assert await told.next_event() == Event("a")
    for attempt in (told, silent):
        with pytest.raises(EngineDiedError):
            await attempt.next_event()
        assert attempt.is_over
    with pytest.raises(ServingError):
        bench.client.start("c", "submit")
    bench.client.control("cancel")
    assert "cancel" not in bench.process.sent


async def test_busy_time_counts_from_the_command_and_starts_again_with_each_batch(bench):
    async def taken(attempt):
        return await attempt.next_event()

    assert bench.client.busy_without_progress_s == 0.0
    attempt = bench.client.start("a", "submit")
    bench.clock.advance(3.0)
    assert bench.client.busy_without_progress_s == 3.0
    bench.process.give(Event("a"), num_commands=1, num_running=1)
    await taken(attempt)
    assert bench.client.busy_without_progress_s == 0.0
    bench.clock.advance(2.0)
    assert bench.client.busy_without_progress_s == 2.0
    bench.process.give(Event("a"), num_commands=1, num_held=1)
    await taken(attempt)
    bench.clock.advance(60.0)
    assert bench.client.busy_without_progress_s == 0.0


async def test_a_command_that_is_not_applied_yet_keeps_the_engine_busy(bench):
    attempt = bench.client.start("a", "submit")
    bench.client.control("renew")
    bench.process.give(Event("a"), num_commands=1, num_held=1)
    await attempt.next_event()
    bench.clock.advance(1.0)
    assert bench.client.busy_without_progress_s == 1.0
