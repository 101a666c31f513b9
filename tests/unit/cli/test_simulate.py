from __future__ import annotations

import pytest
from typer.testing import CliRunner

from baton.cli.commands import app


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


def test_it_finds_the_ratio_for_a_mix():
    result = run(
        "--find-ratio", "--prefill", "1", "--decode", "3", "--requests", "60", "--rate", "40", "--mix", "1:900:2"
    )
    assert result.exit_code == 0, result.output
    assert "best ratio for this load: 3 prefill to 1 decode" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mix", "1:2"], "SHARE:PROMPT:OUTPUT"),
        (["--mix", "1:90000:2"], "does not fit"),
        (["--find-ratio"], "three workers"),
        (["--rate", "0"], "--rate"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words):
    result = run(*flags)
    assert result.exit_code == 2
    assert words in result.output
