"""The whole system beside its peers, clients on the same cores: `python -m benchmarks.whole_system [--quick]`.

Baton runs as `baton up` starts it, with gateway, Redis and both workers, and is called over gRPC. Peers run as one
process without any network before them. Systems run one at a time; every one gets the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from benchmarks.load import LoadSummary, RequestFailedError, run_load, warm_up
from benchmarks.machine import busy_share, describe_machine, tree_cpu_s
from benchmarks.report import Figure, print_figures, print_table, write_json
from benchmarks.systems.catalogue import BATON, BATON_INT8, LLAMA_CPP, TRANSFORMERS, VLLM
from benchmarks.systems.system import CannotRunError
from benchmarks.workload import mixed, uniform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.load import Sample
    from benchmarks.systems.catalogue import Choice
    from benchmarks.systems.system import System
    from benchmarks.workload import Request

OUT = Path("benchmarks/out/peers.json")
SEED = 20
# Offered to every system alike; what it was in the run stands in the JSON.
MIXED_RATE_PER_S = 0.5
OURS = (BATON, BATON_INT8)
CHOICES = (*OURS, LLAMA_CPP, VLLM, TRANSFORMERS)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one system did. `reason` says why it did not run, else it is None.

    `cpu_s`: processor seconds of all its processes and of its clients during each load.
    """

    name: str
    configuration: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    busy_before: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    reason: str | None = None

    def summary(self, load: str) -> LoadSummary | None:
        """Figures of one load; None when it did not run."""
        return LoadSummary.of(self.samples[load]) if load in self.samples else None

    def cpu_ms_per_token(self, load: str) -> float | None:
        """Processor time of one load for each token that came, in milliseconds; None when none did."""
        num_tokens = sum(sample.num_tokens for sample in self.samples.get(load, ()))
        return self.cpu_s[load] * 1000 / num_tokens if num_tokens else None

    def as_json(self) -> dict[str, Any]:
        """Configuration, summaries and every sample."""
        return {
            "configuration": self.configuration,
            "not_runnable": self.reason,
            "busy_share_before": self.busy_before,
            "cpu_s": self.cpu_s,
            "summaries": {load: asdict(LoadSummary.of(samples)) for load, samples in self.samples.items()},
            "samples": {load: [each.as_json() for each in samples] for load, samples in self.samples.items()},
        }


def loads(*, quick: bool, rate_per_s: float) -> dict[str, list[Request]]:
    """The loads by name."""
    if quick:
        return {"single": uniform(SEED, 1, 128, 32), "streams_16": uniform(SEED + 1, 16, 128, 32)}
    return {
        "single": uniform(SEED, 1, 128, 128),
        "streams_16": uniform(SEED + 1, 16, 128, 128),
        "mixed": mixed(SEED + 2, 24, rate_per_s),
    }


async def measure(choice: Choice, requests: Mapping[str, Sequence[Request]]) -> Outcome:
    """Runs one system through all loads. A system that does not run, or stops, says so in its outcome."""
    outcome = Outcome(name=choice.name)
    try:
        async with choice.start() as system:
            outcome.configuration = system.configuration
            await _run_loads(system, requests, outcome)
    except (CannotRunError, RequestFailedError) as error:
        outcome.reason = f"not runnable here: {error}"
    return outcome


async def _run_loads(system: System, requests: Mapping[str, Sequence[Request]], outcome: Outcome) -> None:
    await warm_up(system.client, num_requests=4)
    for load, each in requests.items():
        outcome.busy_before[load] = await asyncio.to_thread(busy_share)
        cpu_before_s = tree_cpu_s()
        outcome.samples[load] = await run_load(system.client, each)
        outcome.cpu_s[load] = tree_cpu_s() - cpu_before_s


def figures_of(outcomes: Sequence[Outcome], load_names: Sequence[str]) -> list[Figure]:
    """Baton's figures, once beside each peer; those with int8 weights have its name before theirs."""
    names = [choice.name for choice in OURS]
    peers = [outcome for outcome in outcomes if outcome.name not in names]
    figures = []
    for load, baton in product(load_names, (outcome for outcome in outcomes if outcome.name in names)):
        ours, prefix = baton.summary(load), "int8_" if baton.name == BATON_INT8.name else ""
        for peer in peers:
            theirs = peer.summary(load)
            for field_name, unit in (
                ("output_tokens_per_s", "tokens/s"),
                ("tpot_p50_s", "s"),
                ("ttft_p50_s", "s"),
                ("ttft_p95_s", "s"),
            ):
                figures.append(
                    Figure(
                        name=f"{prefix}{load}_{field_name}",
                        value=None if ours is None else getattr(ours, field_name),
                        unit=unit,
                        n=0 if ours is None else ours.num_complete,
                        peer=peer.name,
                        peer_value=None if theirs is None else getattr(theirs, field_name),
                        note=baton.reason or peer.reason or _failures(theirs),
                    )
                )
            figures.append(
                Figure(
                    name=f"{prefix}{load}_cpu_ms_per_token",
                    value=baton.cpu_ms_per_token(load),
                    unit="ms",
                    n=0 if ours is None else ours.num_complete,
                    peer=peer.name,
                    peer_value=peer.cpu_ms_per_token(load),
                    note=baton.reason or peer.reason or _failures(theirs),
                )
            )
    return figures


def _failures(summary: LoadSummary | None) -> str:
    return f"{summary.num_failed} requests of the peer failed" if summary is not None and summary.num_failed else ""


def show(console: Console, outcomes: Sequence[Outcome], load_names: Sequence[str], hour_price: float) -> None:
    """A row a system and load. `hour_price`: what the machine costs an hour."""
    rows = []
    for load in load_names:
        for outcome in outcomes:
            summary = outcome.summary(load)
            if summary is None:
                rows.append((load, outcome.name, *[""] * 10, outcome.reason or "not run"))
                continue
            figures = (
                summary.ttft_p50_s,
                summary.ttft_p95_s,
                summary.tpot_p50_s,
                summary.gap_p50_s,
                summary.gap_p99_s,
            )
            cost = summary.cost_per_million_tokens(hour_price)
            counts = (f"{summary.num_complete}", f"{summary.output_tokens_per_s:.1f}", f"{cost:.2f}")
            failed = f"{summary.num_failed} failed" if summary.num_failed else ""
            cpu = outcome.cpu_ms_per_token(load)
            rest = ("" if cpu is None else f"{cpu:.1f}", f"{outcome.busy_before[load]:.0%}", failed)
            rows.append((load, outcome.name, *counts, *[f"{each:.3f}" for each in figures], *rest))
    headings = (
        "",
        "system",
        "n",
        "tokens/s",
        "cost/M",
        "TTFT p50",
        "p95",
        "TPOT p50",
        "gap p50",
        "gap p99",
        "CPU ms/token",
        "busy before",
        "",
    )
    print_table(console, "whole system (seconds)", headings, rows)


async def run(*, quick: bool, rate_per_s: float, hour_price: float, only: Sequence[str]) -> None:
    """Measures, prints and writes."""
    console = Console()
    requests = loads(quick=quick, rate_per_s=rate_per_s)
    outcomes = []
    for choice in CHOICES:
        if choice.kind == BATON.kind or not only or choice.kind in only:
            console.print(f"{choice.name} ...", highlight=False)
            outcomes.append(await measure(choice, requests))
    figures = figures_of(outcomes, list(requests))
    show(console, outcomes, list(requests), hour_price)
    print_figures(console, "Baton beside each peer", figures)
    write_json(
        OUT,
        {
            "machine": describe_machine(),
            "configuration": {"quick": quick, "seed": SEED, "mixed_rate_per_s": rate_per_s, "hour_price": hour_price},
            "figures": [figure.as_json() for figure in figures],
            "systems": {outcome.name: outcome.as_json() for outcome in outcomes},
        },
    )
    console.print(f"written to {OUT}", highlight=False)


def main() -> None:
    """Prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description="The whole system beside its peers.")
    parser.add_argument("--quick", action="store_true", help="short answers, no mixed load")
    parser.add_argument("--rate", type=float, default=MIXED_RATE_PER_S, help="arrivals a second of the mixed load")
    parser.add_argument(
        "--hour-price", type=float, default=1.0, help="of the machine, for the cost of a million tokens"
    )
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="peers to run; default: all")
    options = parser.parse_args()
    asyncio.run(run(quick=options.quick, rate_per_s=options.rate, hour_price=options.hour_price, only=options.only))


if __name__ == "__main__":
    main()
