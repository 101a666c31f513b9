from __future__ import annotations

import pytest
import torch

from baton.core.generation import TokenLogprobs
from baton.engine.logprobs import logprobs_of


def test_they_are_the_log_of_the_softmax():
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)) * 5
    expected = torch.log_softmax(logits.to(torch.float64), dim=-1)
    token_ids, tops = [7, 0, 499, 250], [3, 0, 20, 1]
    for row, each in enumerate(logprobs_of(logits, token_ids, tops)):
        assert each.logprob == pytest.approx(expected[row, token_ids[row]].item(), abs=1e-5)
        largest = expected[row].topk(tops[row])
        assert [token_id for token_id, _ in each.top] == largest.indices.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(largest.values.tolist(), abs=1e-5)


def test_large_logits_do_not_overflow_and_none_may_be_asked_for():
    logits = torch.tensor([[3e4, -3e4, 0.0]])
    assert logprobs_of(logits, [0], [0]) == [TokenLogprobs(0.0)]
    assert logprobs_of(logits, [1], [2]) == [TokenLogprobs(-6e4, ((0, 0.0), (2, -3e4)))]


def test_more_than_the_vocabulary_is_all_of_it():
    (each,) = logprobs_of(torch.zeros(1, 3), [2], [20])
    assert sorted(token_id for token_id, _ in each.top) == [0, 1, 2]
