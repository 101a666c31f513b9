from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import pytest

from benchmarks.load import LoadSummary, RequestFailedError, Sample, run_load
from benchmarks.workload import Request, chats, mixed, shifted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def sample(*times_s: float, scheduled_s: float = 0.0, tokens_each: list[int] | None = None) -> Sample:
    counts = tokens_each or [1] * len(times_s)
    return Sample(
        name="x",
        prompt_tokens=3,
        max_tokens=sum(counts),
        scheduled_s=scheduled_s,
        token_times_s=list(times_s),
        tokens_each=counts,
    )


class Echo:
    """Answers at once, refuses prompts that begin with 0, and holds every answer back until `expected` are there."""

    def __init__(self, expected: int) -> None:
        self.left = expected
        self.all_there = asyncio.Event()

    async def generate(self, request: Request) -> AsyncIterator[int]:
        self.left -= 1
        if self.left == 0:
            self.all_there.set()
        await self.all_there.wait()
        if request.prompt[0] == 0:
            raise RequestFailedError("queue is full")
        if request.prompt[0] == 1:
            yield request.max_tokens - 1
            return
        for _ in range(request.max_tokens):
            yield 1


def test_times_count_from_when_a_request_was_due() -> None:
    late = sample(3.0, 3.5, 4.5, scheduled_s=2.0)
    assert late.ttft_s == 1.0
    assert late.total_s == 2.5
    assert late.gaps_s == [0.5, 1.0]
    assert late.tpot_s == 0.75


def test_a_message_of_several_tokens_is_one_gap() -> None:
    coalesced = sample(1.0, 1.5, tokens_each=[1, 4])
    assert coalesced.gaps_s == [0.5]
    assert coalesced.tpot_s == 0.125


def test_a_summary_is_of_complete_requests_and_counts_the_others() -> None:
    broken = sample(1.0)
    broken.error = "refused"
    summary = LoadSummary.of([sample(1.0, 2.0), sample(2.0, 4.0, scheduled_s=1.0), broken])
    assert (summary.num_complete, summary.num_failed, summary.num_gaps) == (2, 1, 2)
    assert summary.ttft_p50_s == 1.0
    assert summary.gap_p50_s == 1.5
    assert summary.wall_s == 4.0
    assert summary.output_tokens_per_s == 1.0
    assert summary.cost_per_million_tokens(3.6) == 1000.0


def test_a_summary_of_nothing_has_no_figures() -> None:
    summary = LoadSummary.of([])
    assert summary.num_complete == 0
    assert math.isnan(summary.ttft_p95_s)
    assert math.isnan(summary.output_tokens_per_s)


async def test_requests_are_sent_whatever_became_of_the_others() -> None:
    # No answer comes before the last request is sent: a closed loop would never end.
    requests = [Request(name=str(index), prompt=(5,), max_tokens=2, at_s=index * 0.01) for index in range(5)]
    async with asyncio.timeout(60):
        samples = await run_load(Echo(5), requests)
    assert [each.name for each in samples] == ["0", "1", "2", "3", "4"]
    assert all(each.is_complete for each in samples)
    assert all(each.sent_s >= each.scheduled_s for each in samples)


async def test_refusals_and_short_answers_are_samples_too() -> None:
    requests = [Request(name=str(first), prompt=(first,), max_tokens=3) for first in (0, 1, 2)]
    refused, short, whole = await run_load(Echo(3), requests)
    assert refused.error == "queue is full"
    assert short.error == "2 of 3 tokens came"
    assert whole.error is None
    assert LoadSummary.of([refused, short, whole]).num_failed == 2


@pytest.mark.parametrize("make", [lambda: chats(1, 20, 0.4), lambda: mixed(1, 50, 2.0)])
def test_workloads_are_the_same_each_time(make) -> None:
    assert make() == make()


def test_chats_are_short_and_come_at_their_interval() -> None:
    requests = shifted(chats(3, 20, 0.4), 1.0)
    assert all(40 <= len(request.prompt) <= 120 and request.max_tokens == 64 for request in requests)
    assert [request.at_s for request in requests] == pytest.approx([1.0 + 0.4 * index for index in range(20)])


def test_mixed_lengths_stay_in_their_bounds_and_arrive_in_order() -> None:
    requests = mixed(4, 300, 2.0)
    assert all(8 <= len(request.prompt) <= 1024 and 8 <= request.max_tokens <= 256 for request in requests)
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert 0.35 < requests[-1].at_s / len(requests) < 0.65
