from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from benchmarks.report import Figure, print_figures, write_json

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = {"name", "value", "unit", "n", "peer", "peer_value", "ratio", "limit", "limit_ratio", "note"}
FIELDS |= {"goal_ratio", "goal_limit_ratio", "is_met"}


def test_more_of_a_rate_is_better() -> None:
    figure = Figure(name="decode", value=30.0, unit="tokens/s", n=5, peer="other", peer_value=20.0, limit=40.0)
    assert figure.ratio == pytest.approx(1.5)
    assert figure.limit_ratio == pytest.approx(0.75)


def test_less_of_a_time_is_better() -> None:
    figure = Figure(name="ttft", value=0.2, unit="s", n=5, peer="other", peer_value=0.3, limit=0.1)
    assert figure.ratio == pytest.approx(1.5)
    assert figure.limit_ratio == pytest.approx(0.5)


def test_a_goal_is_met_missed_or_not_measured() -> None:
    figure = Figure(name="decode", value=30.0, unit="tokens/s", n=5, peer="other", peer_value=20.0, goal_ratio=1.5)
    assert figure.is_met is True
    assert replace(figure, peer_value=21.0).is_met is False
    assert replace(figure, peer_value=None).is_met is None
    assert replace(figure, goal_ratio=None).is_met is None
    within = Figure(name="start", value=9.0, unit="s", n=1, limit=15.0, goal_limit_ratio=1.0)
    assert within.is_met is True
    assert replace(within, value=16.0).is_met is False


def test_json_has_every_field_and_null_for_what_is_not_known() -> None:
    absent = Figure(name="decode", value=None, unit="tokens/s", n=0, peer="other", note="not runnable here: no")
    assert absent.as_json() == dict.fromkeys(FIELDS) | {
        "name": "decode",
        "unit": "tokens/s",
        "n": 0,
        "peer": "other",
        "note": "not runnable here: no",
    }
    unmeasured = Figure(name="ttft", value=float("nan"), unit="s", n=0, peer_value=1.0)
    assert unmeasured.as_json()["value"] is None
    assert unmeasured.as_json()["ratio"] is None


def test_json_files_are_strict_and_leave_nothing_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "out" / "figures.json"
    write_json(path, {"nested": [{"value": float("inf")}, (1, 2.5)], "text": "as it is"})
    assert json.loads(path.read_text()) == {"nested": [{"value": None}, [1, 2.5]], "text": "as it is"}
    assert [each.name for each in path.parent.iterdir()] == ["figures.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, {"value": 1})
    with pytest.raises(TypeError):
        write_json(path, {"value": object()})
    assert json.loads(path.read_text()) == {"value": 1}


def test_the_table_shows_a_peer_that_does_not_run() -> None:
    output = io.StringIO()
    figures = [
        Figure(name="prefill", value=1234.5, unit="tokens/s", n=3, peer="other", peer_value=617.25),
        Figure(name="prefill", value=1234.5, unit="tokens/s", n=3, peer="third", note="not runnable here: [AVX-512]"),
    ]
    print_figures(Console(file=output, width=40), "engine", figures)
    first, second = [line for line in output.getvalue().splitlines() if line.startswith("prefill")]
    assert first.split() == ["prefill", "1,234", "tokens/s", "3", "other", "617.2", "2.00"]
    assert "third" in second
    assert second.rstrip().endswith("not runnable here: [AVX-512]")
