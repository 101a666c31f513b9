"""Figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


MAX_WIDTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure, beside a peer's and beside a limit of the machine, each measured in the same run.

    `n` counts the samples behind `value`. `ratio` and `limit_ratio` are above 1 where Baton is better than the peer or
    than the limit, whichever way `unit` runs. `note` says what `value` leaves out. A goal is the least that one of the
    two should be.
    """

    name: str
    value: float | None
    unit: str
    n: int
    peer: str | None = None
    peer_value: float | None = None
    limit: float | None = None
    goal_ratio: float | None = None
    goal_limit_ratio: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer."""
        return self._times_better(self.peer_value)

    @property
    def limit_ratio(self) -> float | None:
        """Which part of the limit is reached."""
        return self._times_better(self.limit)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached; None without one, and where what it is compared with was not measured."""
        goals = ((self.ratio, self.goal_ratio), (self.limit_ratio, self.goal_limit_ratio))
        met = [reached >= goal for reached, goal in goals if reached is not None and goal is not None]
        return all(met) if met else None

    def as_json(self) -> dict[str, Any]:
        """All fields, both ratios and whether the goal is met; what is not known is null."""
        fields = asdict(self) | {
            "ratio": self.ratio,
            "limit_ratio": self.limit_ratio,
            "is_met": self.is_met,
        }
        return {name: _finite(value) for name, value in fields.items()}

    def _times_better(self, other: float | None) -> float | None:
        if self.value is None or other is None or not self.value or not other:
            return None
        # Rates are per second; everything else here is time or memory, of which less is better.
        return self.value / other if self.unit.endswith("/s") else other / self.value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` to `path`, whole or not at all; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")
    unfinished.replace(path)


def print_figures(console: Console, title: str, figures: Iterable[Figure]) -> None:
    """One row a figure."""
    rows = [
        (
            figure.name,
            _number(figure.value),
            figure.unit,
            str(figure.n),
            figure.peer or "",
            _number(figure.peer_value),
            _times(figure.ratio),
            _number(figure.limit),
            _times(figure.limit_ratio),
            _goal(figure),
            figure.note,
        )
        for figure in figures
    ]
    print_table(
        console, title, ("", "value", "unit", "n", "peer", "peer's", "ratio", "limit", "of limit", "goal", ""), rows
    )


def print_table(console: Console, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose numbers stand at the right. It is as wide as it must be: output may go to a file."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "goal", "unit", "peer", "system") else "right")
    for row in rows:
        # Text, because an error of a peer may look like markup.
        table.add_row(*map(Text, row))
    width = Measurement.get(console, console.options.update(max_width=MAX_WIDTH), table).maximum
    Console(file=console.file, width=width).print(table, highlight=False)


def _goal(figure: Figure) -> str:
    goal = figure.goal_ratio or figure.goal_limit_ratio
    if goal is None:
        return ""
    verdict = {True: "met", False: "MISSED", None: "not measured"}[figure.is_met]
    return f"{goal:.2f} {verdict}"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.4g}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
