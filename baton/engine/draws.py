"""The tokens that a step's logits give: one for each slice that samples, and one more for each further choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from baton.engine.batch import StepOutput
from baton.engine.logits import apply_rules
from baton.engine.logprobs import logprobs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from baton.core.generation import SamplingParams, TokenLogprobs
    from baton.engine.batch import BatchPlan, SequenceSlice

    # One token a row, from float32 logits [rows, vocab_size] and the positions where the tokens will stand.
    Sample = Callable[[torch.Tensor, Sequence[SamplingParams], Sequence[int]], list[int]]


def draw_tokens(
    logits: torch.Tensor, plan: BatchPlan, sample: Sample, scores: Mapping[str, Sequence[TokenLogprobs]]
) -> StepOutput:
    """What came of a step: `logits` [slices that sample, vocab_size] are in the plan's order, `scores` the prompts'."""
    sampling = [piece for piece in plan.slices if piece.sampling is not None]
    if not sampling:
        return StepOutput(tokens=[None] * len(plan.slices), prompt_logprobs=scores)
    adjusted = apply_rules(logits, [piece.rules for piece in sampling])
    draws = [_Draw(row, piece, offset) for row, piece in enumerate(sampling) for offset in range(piece.num_choices)]
    if len(draws) > len(sampling):
        rows = [draw.row for draw in draws]
        logits, adjusted = logits[rows], adjusted[rows]
    chosen = sample(adjusted, [draw.sampling for draw in draws], [draw.piece.end_position for draw in draws])
    firsts, others = _by_piece(draws, chosen)
    return StepOutput(
        tokens=[None if piece.sampling is None else next(firsts) for piece in plan.slices],
        other_tokens=others,
        logprobs=_logprobs(logits, draws, chosen),
        prompt_logprobs=scores,
    )


class _Draw(NamedTuple):
    """One token to be chosen from the logits in `row`: of a slice that samples, for the choice after so many others."""

    row: int
    piece: SequenceSlice
    offset: int

    @property
    def sampling(self) -> SamplingParams:
        assert self.piece.sampling is not None, "it samples"
        return self.piece.sampling.of_choice(self.offset)


def _by_piece(draws: Sequence[_Draw], tokens: Sequence[int]) -> tuple[Iterator[int], dict[str, list[int]]]:
    """The token of each slice's own choice, in their order, and those of the choices after it."""
    others: dict[str, list[int]] = {}
    for draw, token in zip(draws, tokens, strict=True):
        if draw.offset:
            others.setdefault(draw.piece.attempt_id, []).append(token)
    return iter([token for draw, token in zip(draws, tokens, strict=True) if not draw.offset]), others


def _logprobs(
    logits: torch.Tensor, draws: Sequence[_Draw], tokens: Sequence[int]
) -> dict[tuple[str, int], TokenLogprobs]:
    """Of the tokens that were drawn for those slices that ask for it; a row of `logits` each."""
    rows = [row for row, draw in enumerate(draws) if draw.piece.top_logprobs is not None]
    if not rows:
        return {}
    tops = [draw.piece.top_logprobs for draw in draws if draw.piece.top_logprobs is not None]
    values = logprobs_of(logits[rows], [tokens[row] for row in rows], tops)
    pieces = [(draws[row].piece, draws[row].offset) for row in rows]
    return {
        (piece.attempt_id, piece.choice + offset): each for (piece, offset), each in zip(pieces, values, strict=True)
    }
