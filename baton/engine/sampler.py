"""Choosing the next tokens from logits.

The token at position p of a sequence is a function of its logits, its `SamplingParams` and p: each id waits for an
exponentially distributed time, derived from (seed, p, id), and the largest probability divided by its time wins; an
id wins with its probability. So a sequence gets the same tokens in any batch and on any worker. The same logits
rounded in another way, by a cache that was computed in other chunks, give another token only where two ids are
nearly tied; one number that inverts the cumulative distribution would move to a neighbouring id far more often.

Every row is computed on its own, and filters compare with thresholds rather than with ranks, so that equal logits,
which are common in half precision, are kept or dropped together whatever order a sort puts them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from baton.core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core.generation import SamplingParams

    # Brings the elements of a tensor [n] to the host. Blocks.
    Fetch = Callable[[torch.Tensor], list[int]]

# Most nuclei are far smaller than the vocabulary, and finding the largest few is far cheaper than sorting it.
NUCLEUS_CANDIDATES = 1024

_MASK64, _MASK32 = (1 << 64) - 1, (1 << 32) - 1
_GOLDEN, _GOLDEN32 = 0x9E3779B97F4A7C15, 0x9E3779B9


def race_key(seed: int, position: int) -> int:
    """64 bits that depend on nothing but `seed` (taken modulo 2**64) and `position`."""
    return _mix(_mix(seed) + position * _GOLDEN)


def uniforms(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1) that depend on a key and an id alone: float64 [keys, ids], for int64 `ids` on any device."""
    low, high = (
        torch.tensor([each >> shift & _MASK32 for each in keys], device=ids.device)[:, None] for shift in (0, 32)
    )
    hashes = _mix32(ids * _GOLDEN32 + low)
    hashes = _mix32(hashes.bitwise_xor_(high))
    return hashes.to(torch.float64).add_(0.5).mul_(2.0**-32)


def to_list(values: torch.Tensor) -> list[int]:
    """The elements of `values` [n], as PyTorch brings them here. Blocks."""
    elements: list[int] = values.tolist()
    return elements


class Race(Protocol):
    """The searches through whole rows; each row's result depends on that row alone. Both block."""

    def __call__(self, probabilities: torch.Tensor, keys: Sequence[int]) -> list[int]:
        """Each row's id with the largest probability divided by -log(uniform), the lowest among equals.

        Takes float32 [rows, vocab_size], not necessarily of sum 1, each row with one above 0, and a `race_key` a row.
        """
        ...

    def largest(self, logits: torch.Tensor) -> list[int]:
        """The lowest id with the row's largest logit, of float32 [rows, vocab_size]; -1 without a finite maximum."""
        ...


class TorchRace:
    """The searches by PyTorch, on any device, from which `fetch` brings what they find. Implements `Race`."""

    def __init__(self, fetch: Fetch = to_list) -> None:
        self._fetch = fetch

    def __call__(self, probabilities: torch.Tensor, keys: Sequence[int]) -> list[int]:
        """See `Race`."""
        ids = (probabilities > 0).any(dim=0).nonzero()[:, 0]
        times = uniforms(keys, ids).log_().neg_()
        places = torch.div(probabilities[:, ids], times, out=times).argmax(dim=-1)
        return self._fetch(ids[places])

    def largest(self, logits: torch.Tensor) -> list[int]:
        """See `Race`."""
        best, ids = logits.max(dim=-1)
        # One question to the device.
        return self._fetch(ids.masked_fill(best.isfinite().logical_not(), -1))


torch_race = TorchRace()


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    race: Race = torch_race,
) -> list[int]:
    """One token a row: `logits` is float32 [rows, vocab_size], `positions[i]` where row i's token will stand.

    Filters apply in the order temperature, top-k, top-p, min-p; then `race` draws. Greedy rows take the largest
    logit, the lowest id among equals. Blocks until the tokens are known. InternalError when a row has no finite
    maximum.
    """
    tokens = race.largest(logits)
    if -1 in tokens:
        raise InternalError("the model's logits are not finite")
    drawn = [row for row, row_params in enumerate(params) if not row_params.is_greedy]
    if drawn:
        with torch.inference_mode():
            probabilities = _filtered(logits[drawn], [params[row] for row in drawn])
            chosen = race(probabilities, [race_key(params[row].seed, positions[row]) for row in drawn])
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on its next state."""
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _mix32(values: torch.Tensor) -> torch.Tensor:
    """The finaliser "lowbias32" (Wellons, 2018) on the low 32 bits of int64 `values`, in place.

    A product may wrap, which leaves its low 32 bits right.
    """
    values &= _MASK32
    values ^= values >> 16
    values.mul_(0x7FEB352D).bitwise_and_(_MASK32)
    values ^= values >> 15
    values.mul_(0x846CA68B).bitwise_and_(_MASK32)
    values ^= values >> 16
    return values


def _filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Each id's probability before the filters, 0 where one drops it: [rows, vocab_size]. The likeliest stay."""
    temperatures = torch.tensor([each.temperature for each in params], device=logits.device)
    # The largest logit becomes 0 first: a tiny temperature then underflows the others and overflows nothing.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    probabilities = torch.softmax(shifted / temperatures[:, None], dim=-1)
    thresholds = _thresholds(probabilities, params)
    if thresholds is None:
        return probabilities
    return probabilities.masked_fill(probabilities < thresholds[:, None], 0.0)


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
