from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

import baton.cli.simulate
from baton.cli.commands import app
from baton.cli.simulate import Scenario, simulate
from baton.sim.load import Arrival, Load, Part
from baton.sim.simulation import Fleet
from baton.sim.workers import WorkerSize

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(*flags: str):
    return CliRunner().invoke(app, ["simulate", *flags])


def test_it_prints_percentiles_goodput_and_fairness():
    result = run("--requests", "60", "--rate", "5", "--mix", "1:40-120:16", "--tenants", "2")
    assert result.exit_code == 0, result.output
    assert "1 prefill and 1 decode workers, 60 requests at 5/s" in result.output
    (chat,) = [line.split() for line in result.output.splitlines() if line.startswith("chat")]
    assert chat[1:5] == ["60", "0", "0", "0"]
    for word in ("p50", "p95", "p99", "first token", "goodput", "fairness 1.000"):
        assert word in result.output


def test_it_tells_what_happens_where_fewer_blocks_are_reserved_than_answers_need():
    flags = ["--requests", "40", "--rate", "50", "--mix", "1:20-40:100", "--kv-tokens", "1024", "--swap-tokens", "160"]
    whole, part = run(*flags), run(*flags, "--reserved-share", "0.2")
    assert "0 times a request was swapped out" in whole.output
    assert " 0 times a request was swapped out" not in part.output
    (heading, chat) = [line.split() for line in part.output.splitlines() if line.startswith(("class", "chat"))]
    assert int(chat[heading.index("shed")]) > 0


def test_it_finds_the_ratio_for_a_mix():
    result = run(
        "--find-ratio", "--prefill", "1", "--decode", "3", "--requests", "60", "--rate", "40", "--mix", "1:900:2"
    )
    assert result.exit_code == 0, result.output
    assert "best ratio for this load: 3 prefill to 1 decode" in result.output
    assert [line.partition(":")[0] for line in result.output.splitlines()[:3]] == ["1 to 3", "2 to 2", "3 to 1"]


class InterruptedLoad(Load):
    """Ctrl-C comes before the last request."""

    def arrivals(self) -> Iterator[Arrival]:
        yield from list(super().arrivals())[:-1]
        raise KeyboardInterrupt


def test_a_long_run_tells_how_far_it_is_and_ctrl_c_ends_it_with_what_it_has(monkeypatch, capsys):
    monkeypatch.setattr(baton.cli.simulate, "_PROGRESS_EVERY_S", 0.0)
    size = WorkerSize(num_blocks=4096)
    scenario = Scenario(
        fleet=Fleet(num_prefill=1, num_decode=1, prefill=size, decode=size),
        load=InterruptedLoad(parts=[Part.parse("1:40:2")], rate=1.0, num_requests=1500),
        wanted_first_token_s=1.0,
    )
    output = io.StringIO()
    assert not simulate(scenario, Console(file=output, width=200), find_ratio=False)
    progress = capsys.readouterr().err.splitlines()
    num_ended = len(progress)
    assert 1450 < num_ended < 1500
    assert progress[1200].startswith("baton: 1,201 of 1,500 requests, 1,")
    assert f"1 prefill and 1 decode workers, interrupted after {num_ended} of 1500 requests at 1/s" in output.getvalue()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mix", "1:2"], "SHARE:PROMPT:OUTPUT"),
        (["--mix", "1:90000:2"], "does not fit"),
        (["--mix", "1:100:100:8", "--kv-tokens", "800"], "does not fit"),
        (["--mix", "1:10:2:8", "--sequences", "7"], "--sequences"),
        (["--find-ratio"], "three workers"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words):
    result = run(*flags)
    assert result.exit_code == 2
    assert words in result.output
