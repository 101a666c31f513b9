"""Log-probabilities: natural logarithms of the softmax of the model's own logits, before anything changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.core.generation import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row of `logits` (float32 [rows, vocab_size]): that of its token, and the `tops[row]` largest ones.

    Equal ones are in an order that depends on nothing but the row. Blocks until the values are known.
    """
    with torch.inference_mode():
        totals = logits.logsumexp(dim=-1)
        own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0] - totals
        most = min(max(tops), logits.shape[-1])
        largest = logits.topk(most, dim=-1) if most else None
        values = [] if largest is None else (largest.values - totals[:, None]).tolist()
        ids = [] if largest is None else largest.indices.tolist()
    return [
        TokenLogprobs(value, tuple(zip(ids[row][:top], values[row][:top], strict=True)) if top else ())
        for row, (value, top) in enumerate(zip(own.tolist(), tops, strict=True))
    ]
