"""What a simulation shows: percentiles, goodput and fairness, and the ratio of workers that serves a load best."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from baton.sim.simulation import Outcome


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations in seconds; nearest rank."""

    p50_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Percentiles:
        """NaN for no values."""
        ordered = sorted(values_s)
        if not ordered:
            return cls(math.nan, math.nan, math.nan)
        return cls(*(ordered[max(0, math.ceil(share * len(ordered)) - 1)] for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """One class's requests."""

    ends: Mapping[str, int]
    queue: Percentiles
    time_to_first_token: Percentiles
    time_per_output_token: Percentiles
    whole: Percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run.

    `goodput` counts requests a second whose first token came within the wanted time. `fairness` is the least share
    of its fair part that any tenant got: 1 means that nobody's tokens went to a tenant that asked for more.
    `num_preempted` counts how often requests were swapped out for want of blocks; `most_used_share` is the largest part
    of its blocks that a decode worker had in use.
    """

    classes: Mapping[str, ClassReport]
    lasted_s: float
    goodput: float
    fairness: float
    num_preempted: int
    most_used_share: float


class Tally:
    """Counts a run's outcomes, and keeps about 40 bytes of each."""

    def __init__(self, *, wanted_first_token_s: float) -> None:
        self._wanted_first_token_s = wanted_first_token_s
        self._classes: dict[str, _ClassTally] = {}
        self._wanted: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._num_good = 0
        self._num_preempted = 0
        self._most_used_share = 0.0
        self._lasted_s = 0.0

    @property
    def num_ended(self) -> int:
        """Outcomes so far."""
        return self._wanted.total()

    @property
    def lasted_s(self) -> float:
        """When the last of them ended, by the virtual clock."""
        return self._lasted_s

    def add(self, outcome: Outcome) -> None:
        """Counts one request that ended."""
        is_served, tenant = outcome.end == "tokens", outcome.arrival.tenant
        self._lasted_s = max(self._lasted_s, outcome.ended_s)
        self._wanted[tenant] += 1
        self._served[tenant] += is_served
        self._num_preempted += outcome.num_preempted
        first_token_s = outcome.first_token_s - outcome.arrival.at_s
        self._num_good += is_served and first_token_s <= self._wanted_first_token_s
        if outcome.queue_class not in self._classes:
            self._classes[outcome.queue_class] = _ClassTally()
        self._classes[outcome.queue_class].add(outcome)

    def note_use(self, share: float) -> None:
        """Takes note that a decode worker had such a part of its blocks in use."""
        self._most_used_share = max(self._most_used_share, share)

    def report(self) -> Report:
        """The report on the outcomes so far."""
        fair = max_min_shares(self._wanted, self._served.total())
        return Report(
            classes={name: group.report() for name, group in sorted(self._classes.items())},
            lasted_s=self._lasted_s,
            goodput=self._num_good / self._lasted_s if self._lasted_s > 0 else 0.0,
            fairness=min((self._served[tenant] / share for tenant, share in fair.items() if share > 0), default=1.0),
            num_preempted=self._num_preempted,
            most_used_share=self._most_used_share,
        )


class _ClassTally:
    def __init__(self) -> None:
        self._ends: Counter[str] = Counter()
        # Seconds; eight bytes each.
        self._queue, self._first_token, self._per_token, self._whole = (array("d") for _ in range(4))

    def add(self, outcome: Outcome) -> None:
        self._ends[outcome.end] += 1
        if outcome.end != "tokens":
            return
        arrival = outcome.arrival
        self._queue.append(outcome.granted_s - arrival.at_s)
        self._first_token.append(outcome.first_token_s - arrival.at_s)
        self._whole.append(outcome.ended_s - arrival.at_s)
        longest = max(arrival.output_tokens)
        if longest > 1:
            self._per_token.append((outcome.ended_s - outcome.first_token_s) / (longest - 1))

    def report(self) -> ClassReport:
        return ClassReport(
            ends=self._ends,
            queue=Percentiles.of(self._queue),
            time_to_first_token=Percentiles.of(self._first_token),
            time_per_output_token=Percentiles.of(self._per_token),
            whole=Percentiles.of(self._whole),
        )


def max_min_shares(wanted: Mapping[str, int], total: float) -> dict[str, float]:
    """The max-min fair division of `total`: nobody gets more than wanted, and who gets less gets as much as anyone."""
    shares: dict[str, float] = {}
    left = total
    for index, (tenant, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[tenant] = min(want, left / (len(wanted) - index))
        left -= shares[tenant]
    return shares


def best_split(num_workers: int, evaluate: Callable[[int], tuple[float, float]]) -> int:
    """The number of prefill workers, of `num_workers`, for which `evaluate` gives the greatest value.

    Assumes that it first rises and then falls; asks for about 20 values at most.
    """
    known: dict[int, tuple[float, float]] = {}

    def value(num_prefill: int) -> tuple[float, float]:
        if num_prefill not in known:
            known[num_prefill] = evaluate(num_prefill)
        return known[num_prefill]

    low, high = 1, num_workers - 1
    while high - low > 6:
        step = (high - low) / 4
        points = [low, *(round(low + step * index) for index in (1, 2, 3)), high]
        best = max(range(5), key=lambda index: value(points[index]))
        low, high = points[max(0, best - 1)], points[min(4, best + 1)]
    return max(range(low, high + 1), key=value)
