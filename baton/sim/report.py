"""What a simulation shows: percentiles, goodput and fairness, and the ratio of workers that serves a load best."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
    """

    classes: Mapping[str, ClassReport]
    lasted_s: float
    goodput: float
    fairness: float

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, wanted_first_token_s: float) -> Report:
        """The report on the outcomes of a run; there is at least one."""
        by_class: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            by_class[outcome.queue_class].append(outcome)
        lasted_s = max(outcome.ended_s for outcome in outcomes)
        num_good = sum(
            outcome.end == "tokens" and outcome.first_token_s - outcome.arrival.at_s <= wanted_first_token_s
            for outcome in outcomes
        )
        return cls(
            classes={name: _class_report(group) for name, group in sorted(by_class.items())},
            lasted_s=lasted_s,
            goodput=num_good / lasted_s if lasted_s > 0 else 0.0,
            fairness=_fairness(outcomes),
        )


def _class_report(outcomes: Sequence[Outcome]) -> ClassReport:
    served = [outcome for outcome in outcomes if outcome.end == "tokens"]
    return ClassReport(
        ends=Counter(outcome.end for outcome in outcomes),
        queue=Percentiles.of(outcome.granted_s - outcome.arrival.at_s for outcome in served),
        time_to_first_token=Percentiles.of(outcome.first_token_s - outcome.arrival.at_s for outcome in served),
        time_per_output_token=Percentiles.of(
            (outcome.ended_s - outcome.first_token_s) / (outcome.arrival.output_tokens - 1)
            for outcome in served
            if outcome.arrival.output_tokens > 1
        ),
        whole=Percentiles.of(outcome.ended_s - outcome.arrival.at_s for outcome in served),
    )


def _fairness(outcomes: Sequence[Outcome]) -> float:
    wanted: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for outcome in outcomes:
        wanted[outcome.arrival.tenant] += 1
        served[outcome.arrival.tenant] += outcome.end == "tokens"
    fair = max_min_shares(wanted, served.total())
    return min((served[tenant] / share for tenant, share in fair.items() if share > 0), default=1.0)


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
