from __future__ import annotations

import io

from rich.console import Console

from baton.cli.board import Board
from baton.cli.supervisor import ChildState
from baton.core.clock import ManualClock


def board(*, terminal: bool) -> tuple[Board, io.StringIO, ManualClock]:
    output, clock = io.StringIO(), ManualClock()
    console = Console(file=output, force_terminal=terminal, width=100, color_system=None)
    return Board(console, clock, ["redis", "gateway"]), output, clock


def test_without_a_terminal_each_change_is_a_line():
    shown, output, clock = board(terminal=False)
    with shown:
        shown.changed("gateway", ChildState.STARTING, "")
        clock.advance(2.5)
        shown.changed("gateway", ChildState.READY, "127.0.0.1:8470")
        shown.line("redis", "a [bold]line[/bold] with \x1b[31mcolor\x1b[0m")
    assert output.getvalue().splitlines() == [
        "gateway │ starting",
        "gateway │ ready after 2.5 s 127.0.0.1:8470",
        "redis   │ a [bold]line[/bold] with color",
    ]


def test_on_a_terminal_the_table_shows_all_children():
    shown, output, clock = board(terminal=True)
    with shown:
        shown.changed("gateway", ChildState.STARTING, "")
        clock.advance(1.0)
        shown.changed("gateway", ChildState.RESTARTING, "killed by SIGKILL; again in 0.5 s")
    last = output.getvalue().split("\x1b[2K")[-1]
    assert "redis" in last
    assert "waiting" in last
    assert "restarting" in last
    assert "killed by SIGKILL; again in 0.5 s" in last


def test_after_the_table_has_settled_changes_come_as_lines():
    shown, output, _ = board(terminal=True)
    with shown:
        shown.settle()
        output.truncate(0)
        shown.changed("redis", ChildState.READY, "/tmp/redis.sock")
    assert "redis   │ ready after 0.0 s /tmp/redis.sock" in output.getvalue()


def test_ready_after_tells_of_the_start_that_has_just_ended():
    shown, output, clock = board(terminal=False)
    with shown:
        for took_s in (8.0, 3.0):
            shown.changed("gateway", ChildState.STARTING, "")
            clock.advance(took_s)
            shown.changed("gateway", ChildState.READY, "there")
        shown.changed("gateway", ChildState.NOT_READY, "there")
        clock.advance(60.0)
        shown.changed("gateway", ChildState.READY, "there")
    lines = [line.removeprefix("gateway │ ") for line in output.getvalue().splitlines()]
    expected = ["starting", "ready after 8.0 s there", "starting", "ready after 3.0 s there"]
    assert lines == [*expected, "not ready there", "ready again there"]


def test_phases_of_a_start_are_lines_or_stand_in_the_table():
    shown, output, _ = board(terminal=False)
    with shown:
        shown.changed("gateway", ChildState.STARTING, "")
        shown.line("gateway", "start-up: load (import took 3.1 s)")
    assert "gateway │ start-up: load (import took 3.1 s)" in output.getvalue().splitlines()
    shown, output, _ = board(terminal=True)
    with shown:
        shown.changed("gateway", ChildState.STARTING, "")
        shown.line("gateway", "start-up: load (import took 3.1 s)")
        shown.line("gateway", "something else")
    assert "gateway │ something else" in output.getvalue()
    assert "gateway │ start-up" not in output.getvalue()
    assert "load (import took 3.1 s)" in output.getvalue().split("\x1b[2K")[-1]
