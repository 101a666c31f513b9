from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from baton.core.errors import OutOfRangeError, UnavailableError
from gateway.capacity import refusal_of
from tests.unit.gateway.test_routing import ROUTER, TICKET, view

if TYPE_CHECKING:
    from baton.core.workers import WorkerView


@dataclass
class StubQueue:
    """What was seen last, and what Redis says when it is asked."""

    views: list[WorkerView]
    now: list[WorkerView]
    is_available: bool = True
    num_asked: int = 0

    async def workers(self) -> list[WorkerView]:
        self.num_asked += 1
        return self.now


PAIR = [view("p1"), view("d1")]
SMALL = [view("p1"), view("d1", num_blocks=3)]


async def test_what_fits_is_not_asked_about() -> None:
    queue = StubQueue(PAIR, [])
    assert await refusal_of(TICKET, queue, ROUTER, "m") is None
    assert queue.num_asked == 0


@pytest.mark.parametrize("before", [[], SMALL])
async def test_workers_that_came_since_count(before: list[WorkerView]) -> None:
    assert await refusal_of(TICKET, StubQueue(before, PAIR), ROUTER, "m") is None


async def test_a_refusal_says_what_is_missing() -> None:
    nobody = await refusal_of(TICKET, StubQueue(PAIR[:1], PAIR[:1]), ROUTER, "m")
    assert isinstance(nobody, UnavailableError)
    assert nobody.reason == "NO_WORKER"
    # 33 tokens of prompt and 31 of output: three blocks of 16 hold 15 of these.
    too_long = await refusal_of(TICKET, StubQueue(SMALL, SMALL), ROUTER, "m")
    assert isinstance(too_long, OutOfRangeError)
    assert (too_long.field, too_long.limit) == ("stop.max_tokens", 15)
    too_many = await refusal_of(replace(TICKET, num_choices=3), StubQueue(PAIR, PAIR), ROUTER, "m")
    assert isinstance(too_many, OutOfRangeError)
    assert (too_many.field, too_many.limit) == ("n", 2)


async def test_without_redis_admission_is_left_to_refuse() -> None:
    assert await refusal_of(TICKET, StubQueue([], [], is_available=False), ROUTER, "m") is None
