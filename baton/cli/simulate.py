"""`baton simulate`: a deployment of any size on a virtual clock."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING

from rich.table import Table

from baton.sim.report import Tally, best_split
from baton.sim.simulation import Simulation
from gateway.settings import QueueSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from baton.sim.load import Load
    from baton.sim.report import Percentiles, Report
    from baton.sim.simulation import Fleet


# How often a long run tells how far it is.
_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated, and the time to the first token that counts as good."""

    fleet: Fleet
    load: Load
    wanted_first_token_s: float

    def run(self, tally: Tally) -> None:
        """Simulates once and counts what ends, into `tally`. A run that takes long writes lines to standard error."""
        simulation = Simulation(self.fleet, QueueSettings().queue_classes)
        next_line_s = monotonic() + _PROGRESS_EVERY_S
        try:
            with _no_cycle_search():
                for outcome in simulation.run(self.load.arrivals()):
                    tally.add(outcome)
                    if monotonic() >= next_line_s:
                        next_line_s = monotonic() + _PROGRESS_EVERY_S
                        done = f"{tally.num_ended:,} of {self.load.num_requests:,} requests"
                        print(
                            f"baton: {done}, {tally.lasted_s:,.0f} s of the virtual clock", file=sys.stderr, flush=True
                        )
        finally:
            tally.note_use(simulation.most_used_share)

    def tally(self) -> Tally:
        """An empty one."""
        return Tally(wanted_first_token_s=self.wanted_first_token_s)


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """A simulation makes millions of small objects and no cycles: looking for them takes a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(scenario: Scenario, console: Console, *, find_ratio: bool) -> bool:
    """Prints the report; with `find_ratio` that of the best division of the same number of workers.

    False when Ctrl-C ended the run: then the report is on the requests that had ended.
    """
    if find_ratio:
        scenario = _best(scenario, console)
    tally, is_whole = scenario.tally(), True
    try:
        scenario.run(tally)
    except KeyboardInterrupt:
        is_whole = False
    fleet, load = scenario.fleet, scenario.load
    num_ended = "" if is_whole else f"interrupted after {tally.num_ended} of "
    report = tally.report()
    console.print(
        f"{fleet.num_prefill} prefill and {fleet.num_decode} decode workers,"
        f" {num_ended}{load.num_requests} requests at {load.rate:g}/s: {report.lasted_s:.1f} s"
    )
    console.print(_table(report))
    console.print(f"goodput {report.goodput:.2f} requests/s (first token within {scenario.wanted_first_token_s:g} s)")
    console.print(
        f"KV blocks of a decode worker: at most {report.most_used_share:.0%} in use,"
        f" {report.num_preempted} times a request was swapped out for want of them"
    )
    if load.num_tenants > 1:
        console.print(f"fairness {report.fairness:.3f} (the least share of its fair part that a tenant got)")
    return is_whole


def _best(scenario: Scenario, console: Console) -> Scenario:
    total = scenario.fleet.num_prefill + scenario.fleet.num_decode

    def split(num_prefill: int) -> Scenario:
        fleet = replace(scenario.fleet, num_prefill=num_prefill, num_decode=total - num_prefill)
        return replace(scenario, fleet=fleet)

    def evaluate(num_prefill: int) -> tuple[float, float]:
        tally = scenario.tally()
        split(num_prefill).run(tally)
        report = tally.report()
        console.print(f"{num_prefill} to {total - num_prefill}: goodput {report.goodput:.2f} requests/s")
        # Of two with the same goodput the one that is quicker to the last.
        return round(report.goodput, 3), -report.lasted_s

    best = split(best_split(total, evaluate))
    console.print(f"best ratio for this load: {best.fleet.num_prefill} prefill to {best.fleet.num_decode} decode")
    return best


def _table(report: Report) -> Table:
    ends = ("full", "late", "timeout", "shed")
    table = Table("class", "served", *ends, "", "p50", "p95", "p99", box=None, pad_edge=False)
    for name, group in report.classes.items():
        rows: list[tuple[str, Percentiles]] = [
            ("queue", group.queue),
            ("first token", group.time_to_first_token),
            ("per token", group.time_per_output_token),
            ("whole", group.whole),
        ]
        counts = [str(group.ends.get(end, 0)) for end in ("tokens", *ends)]
        for index, (what, times) in enumerate(rows):
            shown = [f"{value:.3f} s" for value in (times.p50_s, times.p95_s, times.p99_s)]
            table.add_row(*([name, *counts] if index == 0 else [""] * 6), what, *shown)
    return table
