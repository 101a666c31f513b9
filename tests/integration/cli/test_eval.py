"""`baton eval` on a small model: the table, the JSON and the exit status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from baton.cli import evaluation
from baton.cli.commands import app
from baton.engine import quality

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part of the text that comes with the package, and few steps."""
    part = tmp_path / "part.txt"
    part.write_text(evaluation.TEXT.read_text()[:1600])
    monkeypatch.setattr(evaluation, "TEXT", part)
    monkeypatch.setattr(quality, "RATE_STEPS", 1)


def run(*arguments: object):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_a_quantized_configuration_stands_beside_its_type_and_float32(random_llama: Callable[[int], Path]) -> None:
    flags = ("--set", "engine.quantization=int8", "--set", "engine.dtype=bfloat16", "--json")
    result = run(random_llama(64), *flags)
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert [(each["dtype"], each["quantization"]) for each in report["readings"]] == [
        ("float32", "none"),
        ("bfloat16", "none"),
        ("bfloat16", "int8"),
    ]
    float32, bfloat16, int8 = report["readings"]
    assert float32["agreement"] == 1
    assert float32["weight_bytes"] == 2 * bfloat16["weight_bytes"]
    # Rows of 32 are filled up to groups of 64, with a scale.
    assert int8["weight_bytes"] > bfloat16["weight_bytes"]
    assert all(rate > 0 for each in report["readings"] for rate in each["decode_tokens_per_s"].values())
    assert report["tolerated"] == {"perplexity_increase": 0.01, "agreement": 0.95}


def test_a_loss_over_the_threshold_is_the_exit_status(
    random_llama: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "MIN_AGREEMENT", 1.01)
    result = run(random_llama(64), "--set", "engine.dtype=float32")
    assert result.exit_code == 1
    assert "float32: over the tolerated loss" in result.output


def test_what_cannot_be_evaluated_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    result = run(folder)
    assert result.exit_code == 1
    assert "is a GGUF file, not a model folder" in result.output
    assert "NAME=VALUE" in run(folder, "--set", "engine.dtype").output
