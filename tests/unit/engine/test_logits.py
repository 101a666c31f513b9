"""Penalties against transformers' own where it has them, and against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from baton.core.errors import ResourceExhaustedError
from baton.core.generation import FinishReason, SamplingParams, StopRule
from baton.engine.logits import apply_rules
from baton.engine.token_rules import TokenRules, take_token

NO_STOP = StopRule(max_tokens=10, stop_token_ids=frozenset())


def rules(prompt=(), output=(), stop=NO_STOP, **params) -> TokenRules | None:
    return TokenRules.start(SamplingParams(**params), stop, prompt_ids=prompt, output_ids=output)


def adjusted(logits: list[float], *args, **params) -> list[float]:
    return apply_rules(torch.tensor([logits]), [rules(*args, **params)])[0].tolist()


def test_who_asks_for_nothing_has_no_rules_and_no_copy():
    assert rules([1, 2], [3], temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=4) is None
    logits = torch.randn(2, 5)
    assert apply_rules(logits, [None, None]) is logits


@pytest.mark.parametrize("penalty", [0.125, 0.5, 1.25, 8.0])
def test_repetition_penalty_equals_that_of_transformers(penalty):
    prompt, output = [3, 17, 3, 40], [17, 99, 0]
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(
        apply_rules(logits, [rules(prompt, output, repetition_penalty=penalty)]), expected, rtol=1e-6, atol=0
    )


def test_frequency_counts_and_presence_does_not():
    logits = [1.0, 1.0, 1.0, 1.0]
    output = [2, 2, 2, 0]
    assert adjusted(logits, [1], output, frequency_penalty=0.5) == [0.5, 1.0, -0.5, 1.0]
    assert adjusted(logits, [1], output, presence_penalty=0.5) == [0.5, 1.0, 0.5, 1.0]
    both = adjusted(logits, [1], output, frequency_penalty=-0.25, presence_penalty=1.0)
    assert both == [0.25, 1.0, 0.75, 1.0]


def test_biases_come_after_penalties():
    # (8 / 2) - 1 - 0.5 + 3, and (-8 * 2) + 3 for a token that only the prompt has.
    values = adjusted(
        [8.0, -8.0, 8.0],
        [1],
        [0],
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        presence_penalty=0.5,
        logit_bias=((0, 3.0), (1, 3.0)),
    )
    assert values == [5.5, -13.0, 8.0]


def test_stop_tokens_are_forbidden_until_there_are_enough():
    stop = StopRule(max_tokens=10, stop_token_ids=frozenset({1, 3}), min_tokens=3)
    each = rules(stop=stop, logit_bias=((1, 100.0),))
    assert each is not None
    for _ in range(3):
        assert apply_rules(torch.zeros(1, 4), [each])[0].tolist() == [0.0, -math.inf, 0.0, -math.inf]
        each.append(0)
    assert apply_rules(torch.zeros(1, 4), [each])[0].tolist() == [0.0, 100.0, 0.0, 0.0]


def test_rows_keep_to_themselves_and_the_models_logits_stay():
    logits = torch.randn(3, 50)
    before = logits.clone()
    one = rules([5, 6], [7], repetition_penalty=1.5)
    two = rules([], [9, 9], frequency_penalty=1.0)
    together = apply_rules(logits, [one, None, two])
    assert torch.equal(logits, before)
    assert torch.equal(together[1], logits[1])
    assert torch.equal(together[0], apply_rules(logits[:1], [one])[0])
    assert torch.equal(together[2], apply_rules(logits[2:], [two])[0])


def test_rules_are_the_same_however_they_came_about():
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    grown = rules([4, 5], [6], **params)
    assert grown is not None
    for token_id in (6, 4, 8):
        grown.append(token_id)
    logits = torch.randn(1, 10)
    assert torch.equal(apply_rules(logits, [grown]), apply_rules(logits, [rules([4, 5], [6, 6, 4, 8], **params)]))


class Half:
    """A matcher that lets even ids through, until id 4 comes."""

    is_complete = False

    def __init__(self, num_bytes: int) -> None:
        self.allowed = bytearray(b"\x55" * num_bytes)

    def append(self, token_id: int) -> None:
        if token_id == 6:
            raise ResourceExhaustedError("too complex", retry_after_s=None)
        self.is_complete = token_id == 4


def test_a_structure_lets_through_what_its_bits_say_and_no_id_beyond_them():
    params = SamplingParams(logit_bias=((1, 100.0), (2, 1.0)))
    each = TokenRules.start(params, NO_STOP, prompt_ids=(), matcher=Half(1))
    values = apply_rules(torch.zeros(2, 11), [None, each])
    assert values[0].tolist() == [0.0] * 11
    assert values[1].tolist() == [0.0, -math.inf, 1.0, *[-math.inf, 0.0] * 2, *[-math.inf] * 4]


def test_a_structure_ends_its_sequence():
    each = TokenRules.start(SamplingParams(), NO_STOP, prompt_ids=(), matcher=Half(1))
    assert take_token(each, NO_STOP, 2, 1) is None
    assert take_token(each, NO_STOP, 2, 10) is FinishReason.LENGTH
    assert take_token(each, NO_STOP, 4, 10) is FinishReason.STOP
    with pytest.raises(ResourceExhaustedError):
        take_token(each, NO_STOP, 6, 4)
    with pytest.raises(ResourceExhaustedError):
        TokenRules.start(SamplingParams(), NO_STOP, prompt_ids=(), output_ids=[6], matcher=Half(1))
    assert take_token(None, NO_STOP, 6, 1) is None
