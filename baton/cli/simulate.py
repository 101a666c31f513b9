"""`baton simulate`: a deployment of any size on a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.table import Table

from baton.sim.report import Report, best_split
from baton.sim.simulation import Simulation
from gateway.settings import QueueSettings

if TYPE_CHECKING:
    from rich.console import Console

    from baton.sim.load import Load
    from baton.sim.report import Percentiles
    from baton.sim.simulation import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated, and the time to the first token that counts as good."""

    fleet: Fleet
    load: Load
    wanted_first_token_s: float

    def run(self) -> Report:
        """Simulates once."""
        simulation = Simulation(self.fleet, QueueSettings().queue_classes)
        outcomes = simulation.run(self.load.arrivals())
        return Report.of(outcomes, wanted_first_token_s=self.wanted_first_token_s)


def simulate(scenario: Scenario, console: Console, *, find_ratio: bool) -> None:
    """Prints the report; with `find_ratio` that of the best division of the same number of workers."""
    if find_ratio:
        scenario = _best(scenario, console)
    report, fleet = scenario.run(), scenario.fleet
    console.print(
        f"{fleet.num_prefill} prefill and {fleet.num_decode} decode workers,"
        f" {scenario.load.num_requests} requests at {scenario.load.rate:g}/s: {report.lasted_s:.1f} s"
    )
    console.print(_table(report))
    console.print(f"goodput {report.goodput:.2f} requests/s (first token within {scenario.wanted_first_token_s:g} s)")
    if scenario.load.num_tenants > 1:
        console.print(f"fairness {report.fairness:.3f} (the least share of its fair part that a tenant got)")


def _best(scenario: Scenario, console: Console) -> Scenario:
    total = scenario.fleet.num_prefill + scenario.fleet.num_decode

    def split(num_prefill: int) -> Scenario:
        fleet = replace(scenario.fleet, num_prefill=num_prefill, num_decode=total - num_prefill)
        return replace(scenario, fleet=fleet)

    def evaluate(num_prefill: int) -> tuple[float, float]:
        report = split(num_prefill).run()
        # Of two with the same goodput the one that is quicker to the last.
        return round(report.goodput, 3), -report.lasted_s

    best = split(best_split(total, evaluate))
    console.print(f"best ratio for this load: {best.fleet.num_prefill} prefill to {best.fleet.num_decode} decode")
    return best


def _table(report: Report) -> Table:
    table = Table("class", "served", "full", "late", "timeout", "", "p50", "p95", "p99", box=None, pad_edge=False)
    for name, group in report.classes.items():
        rows: list[tuple[str, Percentiles]] = [
            ("queue", group.queue),
            ("first token", group.time_to_first_token),
            ("per token", group.time_per_output_token),
            ("whole", group.whole),
        ]
        ends = [str(group.ends.get(end, 0)) for end in ("tokens", "full", "late", "timeout")]
        for index, (what, times) in enumerate(rows):
            shown = [f"{value:.3f} s" for value in (times.p50_s, times.p95_s, times.p99_s)]
            table.add_row(*([name, *ends] if index == 0 else [""] * 5), what, *shown)
    return table
