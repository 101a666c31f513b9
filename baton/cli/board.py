"""What `baton up` shows: a live table while things start, then one line for each change and each line of output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.live import Live
from rich.table import Table
from rich.text import Text

from baton.cli.supervisor import ChildState
from baton.core.start_up import LINE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.console import Console

    from baton.core.clock import Clock

STYLES = {
    ChildState.WAITING: "dim",
    ChildState.STARTING: "yellow",
    ChildState.READY: "green",
    ChildState.NOT_READY: "yellow",
    ChildState.RESTARTING: "red",
    ChildState.ENDING: "dim",
    ChildState.ENDED: "dim",
}
NAME_COLORS = ("cyan", "magenta", "blue", "green", "yellow")


@dataclass(slots=True)
class _Row:
    state: ChildState = ChildState.WAITING
    detail: str = ""
    started_s: float = 0.0
    start_took_s: float | None = None
    num_restarts: int = 0


class Board:
    """An observer of the supervisor that draws on a console; enter it to show the live table."""

    def __init__(self, console: Console, clock: Clock, names: Sequence[str]) -> None:
        self._console = console
        self._clock = clock
        self._rows = {name: _Row() for name in names}
        self._width = max(map(len, names))
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=5)

    def __enter__(self) -> Self:
        """Shows the live table, if the console is a terminal."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def settle(self) -> None:
        """Leaves the table as it is now on the screen; from here on changes come as lines. Idempotent."""
        if self._live.is_started:
            self._live.stop()

    def changed(self, name: str, state: ChildState, detail: str) -> None:
        """See `Observer`."""
        row = self._rows[name]
        now_s = self._clock.monotonic_s()
        if state is ChildState.STARTING:
            row.started_s = now_s
            row.start_took_s = None
        if state is ChildState.RESTARTING:
            row.num_restarts += 1
        how = ""
        if state is ChildState.READY and row.start_took_s is None:
            row.start_took_s = now_s - row.started_s
            how = f" after {row.start_took_s:.1f} s"
        elif state is ChildState.READY:
            how = " again"
        row.state, row.detail = state, detail
        if not self._live.is_started and state is not ChildState.ENDED:
            self._print(name, Text(f"{state.value}{how} {detail}".rstrip(), style=STYLES[state]))

    def line(self, name: str, text: str) -> None:
        """See `Observer`."""
        row = self._rows[name]
        if self._live.is_started and row.state is ChildState.STARTING and text.startswith(LINE_PREFIX):
            row.detail = text.removeprefix(LINE_PREFIX)  # the table shows it
        else:
            self._print(name, Text.from_ansi(text))

    def note(self, text: str) -> None:
        """Shows a line of the supervisor's own."""
        self._console.print(Text(text), soft_wrap=True)

    def _print(self, name: str, text: Text) -> None:
        color = NAME_COLORS[list(self._rows).index(name) % len(NAME_COLORS)]
        self._console.print(Text(f"{name:<{self._width}} │ ", style=color) + text, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("", "state", "start", "restarts", ""):
            table.add_column(heading, overflow="fold")
        now_s = self._clock.monotonic_s()
        for name, row in self._rows.items():
            took_s = row.start_took_s
            if took_s is None and row.state is ChildState.STARTING:
                took_s = now_s - row.started_s
            table.add_row(
                name,
                Text(row.state.value, style=STYLES[row.state]),
                "" if took_s is None else f"{took_s:.1f} s",
                str(row.num_restarts or ""),
                Text(row.detail),
            )
        return table
