"""The load generator: sends requests at their times, whatever the answers do, and keeps every token's time.

Times count from when a request should have been sent, not from when it was: a generator that falls behind must not
make the system look better.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.statistics import percentile
from benchmarks.workload import uniform

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from benchmarks.workload import Request

REQUEST_TIMEOUT_S = 600.0
WARM_UP_SEED = 7


class RequestFailedError(Exception):
    """The system refused or ended a request; the message is its own."""


class Client(Protocol):
    """One running system that generates."""

    def generate(self, request: Request) -> AsyncIterator[int]:
        """Streams the number of new tokens, message by message, `request.max_tokens` in all. RequestFailedError."""
        ...


@dataclass(slots=True, kw_only=True)
class Sample:
    """What one request saw. Times are seconds since the load's start; `token_times_s` has one entry a message."""

    name: str
    prompt_tokens: int
    max_tokens: int
    scheduled_s: float
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    tokens_each: list[int] = field(default_factory=list)
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(self.tokens_each)

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for came."""
        return self.error is None and self.num_tokens == self.max_tokens

    @property
    def ttft_s(self) -> float:
        """From when it should have been sent to its first token."""
        return self.token_times_s[0] - self.scheduled_s

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; there must be two."""
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - self.tokens_each[0])

    @property
    def total_s(self) -> float:
        """From when it should have been sent to its last token."""
        return self.token_times_s[-1] - self.scheduled_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between messages with tokens: what a reader waits. A message of several tokens counts once."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    def as_json(self) -> dict[str, Any]:
        """Everything that was seen."""
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "scheduled_s": round(self.scheduled_s, 6),
            "sent_s": round(self.sent_s, 6),
            "token_times_s": [round(each, 6) for each in self.token_times_s],
            "tokens_each": self.tokens_each,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """Figures over the complete requests of one load; NaN where nothing was complete."""

    num_complete: int
    num_failed: int
    num_gaps: int
    wall_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    tpot_p50_s: float
    gap_p50_s: float
    gap_p99_s: float
    output_tokens_per_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> LoadSummary:
        """Summary of `samples`. The rate counts from the first send to the last token."""
        complete = [sample for sample in samples if sample.is_complete]
        gaps = [gap for sample in complete for gap in sample.gaps_s]
        ttfts = [sample.ttft_s for sample in complete]
        first_s = min((sample.scheduled_s for sample in complete), default=0.0)
        wall_s = max((sample.token_times_s[-1] for sample in complete), default=0.0) - first_s
        num_tokens = sum(sample.num_tokens for sample in complete)
        return cls(
            num_complete=len(complete),
            num_failed=len(samples) - len(complete),
            num_gaps=len(gaps),
            wall_s=wall_s,
            ttft_p50_s=percentile(ttfts, 50),
            ttft_p95_s=percentile(ttfts, 95),
            tpot_p50_s=percentile([each.tpot_s for each in complete if each.num_tokens > each.tokens_each[0]], 50),
            gap_p50_s=percentile(gaps, 50),
            gap_p99_s=percentile(gaps, 99),
            output_tokens_per_s=num_tokens / wall_s if wall_s > 0 else float("nan"),
        )

    def cost_per_million_tokens(self, hour_price: float) -> float:
        """What a million output tokens cost at this rate, on a machine of `hour_price` an hour."""
        return hour_price * 1e6 / (3600 * self.output_tokens_per_s)


async def run_load(client: Client, requests: Iterable[Request]) -> list[Sample]:
    """Sends each request at its time; returns when all have ended, a failed one with its error in its sample."""
    # A start in the near future, so that the first request is no later than the others.
    start_s = time.perf_counter() + 0.05
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_send(client, request, start_s)) for request in requests]
    return [task.result() for task in running]


async def warm_up(client: Client, *, num_requests: int = 2) -> None:
    """A few small requests whose times nobody keeps. RequestFailedError when one fails."""
    for sample in await run_load(client, uniform(WARM_UP_SEED, num_requests, 64, 8)):
        if not sample.is_complete:
            raise RequestFailedError(sample.error or f"{sample.num_tokens} of {sample.max_tokens} tokens came")


async def _send(client: Client, request: Request, start_s: float) -> Sample:
    sample = Sample(
        name=request.name,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        scheduled_s=request.at_s,
    )
    await asyncio.sleep(max(0.0, start_s + request.at_s - time.perf_counter()))
    sample.sent_s = time.perf_counter() - start_s
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async for num_tokens in client.generate(request):
                sample.token_times_s.append(time.perf_counter() - start_s)
                sample.tokens_each.append(num_tokens)
    except RequestFailedError as error:
        sample.error = str(error)
    except TimeoutError:
        sample.error = f"no end after {REQUEST_TIMEOUT_S:.0f} s"
    if sample.error is None and sample.num_tokens != request.max_tokens:
        sample.error = f"{sample.num_tokens} of {request.max_tokens} tokens came"
    return sample
