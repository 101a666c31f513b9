"""One step's work as plain data: what a scheduler decides and an executor does. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from baton.core.generation import SamplingParams, TokenLogprobs
    from baton.engine.token_rules import TokenRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredIds:
    """Known tokens whose log-probabilities a slice asks for, with those of the `top` most likely ones each.

    `token_ids[i]` stands after the slice's i-th token: the rest of the slice, and the prompt's next token if the
    slice is not its end.
    """

    token_ids: Sequence[int]
    top: int


# Not frozen: one is made for every token of every decode step, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class SequenceSlice:
    """The part of one sequence that a step computes: a prefill chunk, or one token of a decode step.

    `token_ids[i]` stands at position `start_position + i`. The keys and values of all earlier positions are in
    the blocks already; the step writes those of its own tokens. `block_table[j]` is the block of positions
    `j * block_size` up to `(j + 1) * block_size`; it covers at least the slice's last position and may be
    longer. Blocks belong to the caller before, during and after the step. The executor keeps no reference to
    the sequences it is given, so a caller may reuse its lists once `execute` has returned.

    `sampling` is None where no token follows this slice (every chunk of a prompt but its last). `rules` belong to
    the sequence, stand at its last token when the slice samples, and are None where it asks for none.

    Of several outputs of one prompt, each is a sequence with the same `attempt_id` and a `choice` of its own. The
    prompt's last chunk samples the first tokens of `num_choices` of them, all by the same rules: this choice's by
    `sampling`, and those of the following ones by what `sampling` is for them.

    `top_logprobs` asks for the log-probabilities of the sampled token and of so many of the most likely ones;
    `scored` for those of the prompt.
    """

    attempt_id: str
    token_ids: Sequence[int]
    start_position: int
    block_table: Sequence[int]
    sampling: SamplingParams | None
    rules: TokenRules | None = None
    top_logprobs: int | None = None
    scored: ScoredIds | None = None
    choice: int = 0
    num_choices: int = 1

    @property
    def end_position(self) -> int:
        """The position after the slice's last token: where the sampled token will stand."""
        return self.start_position + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """All slices of one step, at most one a sequence; decode steps and prefill chunks may be mixed."""

    slices: Sequence[SequenceSlice]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(piece.token_ids) for piece in self.slices)

    def assert_fits(self, *, block_size: int, num_blocks: int) -> None:
        """Asserts what every executor relies on: a plan that fails is a scheduler's bug, not a bad request."""
        for piece in self.slices:
            assert piece.token_ids, f"{piece.attempt_id}: a slice without tokens"
            assert piece.start_position >= 0, f"{piece.attempt_id}: starts at {piece.start_position}"
            num_needed = -(-piece.end_position // block_size)
            assert len(piece.block_table) >= num_needed, (
                f"{piece.attempt_id}: {len(piece.block_table)} blocks, {piece.end_position} positions need {num_needed}"
            )
            assert min(piece.block_table) >= 0, f"{piece.attempt_id}: a negative block id"
            assert max(piece.block_table) < num_blocks, f"{piece.attempt_id}: a block id beyond {num_blocks - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came of a step: for each slice the token sampled after it, None where it does not sample.

    `other_tokens` has the first tokens of the choices after the slice's own, by attempt and only where there are any.
    `logprobs` has those of the sampled tokens, by attempt and choice, and `prompt_logprobs` those of `ScoredIds`, by
    attempt; both only where they were asked for.
    """

    tokens: Sequence[int | None]
    other_tokens: Mapping[str, Sequence[int]] = field(default_factory=dict)
    logprobs: Mapping[tuple[str, int], TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
