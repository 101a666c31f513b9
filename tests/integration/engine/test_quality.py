"""A precision's loss is that of an independent computation, and the thresholds decide."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from baton.engine import quality
from baton.engine.quality import MAX_PERPLEXITY_INCREASE, MIN_AGREEMENT, Precision, Reading, read
from tests.integration.engine import families

if TYPE_CHECKING:
    from pathlib import Path

FLOAT32 = Precision(dtype="float32", quantization="none")
INT8 = Precision(dtype="float32", quantization="int8")


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "WINDOW", 50)
    monkeypatch.setattr(quality, "CHUNK", 10)


def test_perplexity_and_choices_are_those_of_transformers(tmp_path: Path) -> None:
    families.save_model("llama", tmp_path)
    token_ids = random.Random(1).choices(range(families.SMALL["vocab_size"]), k=120)
    reading = read(tmp_path, token_ids, FLOAT32, "cpu")
    model = families.reference_model(tmp_path)
    total, choices = 0.0, []
    for start in (0, 50):
        window = token_ids[start : start + 50]
        logprobs = families.reference_logits(model, window)[:-1].log_softmax(-1)
        total -= logprobs[torch.arange(49), torch.tensor(window[1:])].sum().item()
        choices += logprobs.argmax(-1).tolist()
    assert reading.perplexity == pytest.approx(math.exp(total / 98), rel=1e-4)
    assert sorted(reading.greedy) == sorted(choices)
    assert reading.weight_bytes == sum(p.numel() for p in model.parameters()) * 4
    assert set(reading.tokens_per_s) == set(quality.RATE_BATCHES)


def test_int8_is_compared_on_the_same_positions(tmp_path: Path) -> None:
    families.save_model("llama-tied", tmp_path)
    token_ids = random.Random(2).choices(range(families.SMALL["vocab_size"]), k=100)
    reference, quantized = (read(tmp_path, token_ids, precision, "cpu") for precision in (FLOAT32, INT8))
    assert abs(quantized.perplexity_increase(reference)) < 0.05
    assert 0.8 < quantized.agreement(reference) <= 1
    assert quantized.weight_bytes < reference.weight_bytes / 2
    assert reference.is_tolerable(reference)


def test_either_threshold_alone_refuses() -> None:
    reference = Reading(precision=FLOAT32, weight_bytes=4, perplexity=20.0, greedy=(0,) * 1000, tokens_per_s={1: 1.0})
    most = 20.0 * (1 + MAX_PERPLEXITY_INCREASE)
    same = int(1000 * MIN_AGREEMENT)
    for perplexity, agreeing, expected in (
        (most * 0.9999, same, True),
        (most * 1.0001, 1000, False),
        (10.0, same - 1, False),
    ):
        other = replace(reference, perplexity=perplexity, greedy=(0,) * agreeing + (1,) * (1000 - agreeing))
        assert other.is_tolerable(reference) is expected
