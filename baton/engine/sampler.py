"""Choosing the next tokens from logits.

The token at position p of a sequence is a function of its logits, its `SamplingParams` and p: one uniform
number, derived from (seed, p), picks the token by inverting the cumulative distribution. So a sequence gets the
same tokens in any batch and on any worker. Every row is computed on its own, and filters compare with thresholds
rather than with ranks, so that equal logits, which are common in half precision, are kept or dropped together
whatever order a sort puts them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import SamplingParams

# Most nuclei are far smaller than the vocabulary, and finding the largest few is far cheaper than sorting it.
NUCLEUS_CANDIDATES = 1024
# Logits that are searched for the position of the largest.
SPAN = 256

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but `seed` (taken modulo 2**64) and `position`."""
    return (_mix(_mix(seed) + position * _GOLDEN) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """One token a row: `logits` is float32 [rows, vocab_size], `positions[i]` where row i's token will stand.

    Filters apply in the order temperature, top-k, top-p, min-p. Greedy rows take the largest logit, the lowest id
    among equals. Blocks until the tokens are known. InternalError when a row has no finite maximum.
    """
    best, greedy = _largest(logits)
    if not bool(best.isfinite().all()):
        raise InternalError("the model's logits are not finite")
    tokens: list[int] = greedy.tolist()
    drawn = [row for row, row_params in enumerate(params) if not row_params.is_greedy]
    if drawn:
        with torch.inference_mode():
            chosen = _draw(logits[drawn], [params[row] for row in drawn], [positions[row] for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit, NaN where there is one, and its lowest id."""
    vocab_size = logits.shape[1]
    num_spans = vocab_size // SPAN
    if num_spans < 2 or logits.device.type != "cpu":
        return logits.max(dim=-1)
    # On a CPU PyTorch finds a maximum several times faster than its position: so the position is sought in one span.
    spans = logits[:, : num_spans * SPAN].view(-1, num_spans, SPAN).amax(dim=-1)
    if num_spans * SPAN < vocab_size:
        spans = torch.cat((spans, logits[:, num_spans * SPAN :].amax(dim=-1, keepdim=True)), dim=1)
    ids = spans.argmax(dim=-1, keepdim=True) * SPAN + torch.arange(SPAN)
    ids.clamp_(max=vocab_size - 1)
    best, within = logits.gather(1, ids).max(dim=-1)
    return best, ids.gather(1, within[:, None])[:, 0]


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on its next state."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    temperatures = torch.tensor([each.temperature for each in params], device=logits.device)
    # The largest logit becomes 0 first: a tiny temperature then underflows the others and overflows nothing.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(shifted / temperatures[:, None], dim=-1)
    thresholds = _thresholds(probabilities, params)
    if thresholds is not None:
        probabilities = probabilities.masked_fill(probabilities < thresholds[:, None], 0.0)
    # Sums of a whole vocabulary lose the small tokens in float32.
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    draws = [uniform(each.seed, position) for each, position in zip(params, positions, strict=True)]
    targets = torch.tensor(draws, dtype=torch.float64, device=logits.device) * cumulative[:, -1]
    # The first token whose cumulative weight exceeds the target: never one of weight 0.
    picked = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]
    last_possible = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    chosen: list[int] = torch.minimum(picked, last_possible).tolist()
    return chosen


def _thresholds(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor | None:
    """The least probability that each row keeps [rows]; None when every row keeps all."""
    vocab_size = probabilities.shape[-1]
    ranked = [row for row, each in enumerate(params) if 0 < each.top_k < vocab_size or each.top_p < 1.0]
    if not ranked and all(each.min_p == 0.0 for each in params):
        return None
    min_p = torch.tensor([each.min_p for each in params], device=probabilities.device)
    thresholds = min_p * probabilities.max(dim=-1).values
    if ranked:
        kept = _rank_thresholds(probabilities[ranked], [params[row] for row in ranked])
        thresholds[ranked] = torch.maximum(thresholds[ranked], kept)
    return thresholds


def _rank_thresholds(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The least probability that top-k and then top-p keep [rows]."""
    vocab_size, device = probabilities.shape[-1], probabilities.device
    top_k = [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params]
    # Rows with top-k need exactly that many; a nucleus without it starts from a guess.
    count = max(min(limit, max(NUCLEUS_CANDIDATES, each.top_k)) for limit, each in zip(top_k, params, strict=True))
    largest = probabilities.topk(min(count, vocab_size), dim=-1).values
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    limits = torch.tensor(top_k, device=device)
    top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)
    last = (limits - 1).clamp(max=largest.shape[-1] - 1)[:, None]
    totals = torch.where(limits < vocab_size, cumulative.gather(1, last)[:, 0], 1.0)
    sizes = torch.searchsorted(cumulative, (top_p * totals)[:, None])
    thresholds = largest.gather(1, torch.minimum(sizes, last))[:, 0]
    beyond = ((sizes[:, 0] >= largest.shape[-1]) & (limits > largest.shape[-1])).nonzero()[:, 0].tolist()
    for row in beyond:
        every = probabilities[row].sort(descending=True).values
        size = torch.searchsorted(every.cumsum(dim=0, dtype=torch.float64), top_p[row])
        thresholds[row] = every[size.clamp(max=vocab_size - 1)]
    return thresholds
