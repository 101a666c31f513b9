"""The seam between scheduling and computing, with the fake that schedulers are tested on.

Imports no torch: `baton.engine.torch_executor` has the executor that runs a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton.core.generation import TokenLogprobs
from baton.engine.batch import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.core.generation import SamplingParams
    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan, SequenceSlice


class Executor(Protocol):
    """Computes one step at a time over a pool of KV blocks. Used from one thread."""

    @property
    def layout(self) -> KVLayout:
        """How the pool lies in memory."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; valid ids are 0 up to `num_blocks`, exclusive."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 up to `vocab_size`, exclusive."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Positions that the model was made for."""
        ...

    @property
    def attention(self) -> str:
        """What computes attention: `native`, `flashinfer` or `torch`."""
        ...

    def execute(self, plan: BatchPlan, pause: Callable[[], None] | None = None) -> StepOutput:
        """Runs the step; returns the tokens sampled after its slices, and what else they ask for.

        Blocks until the step is done; the keys and values are then in the pool. The result for a slice does not
        depend on what else is in the plan, nor on how its sequence was cut into slices. Raises
        OutOfMemoryError when the step does not fit into memory: nothing that other sequences own has changed then,
        what it had allocated is free again, and a smaller plan can succeed. Raises EngineFaultError as `check` does.

        `pause` is called between parts of the step where an executor has such parts that take long. Other steps, of
        other sequences, may be executed in it, without a pause of their own.
        """
        ...

    def rest(self) -> None:
        """There is no step to run for now: what it shares with others, cores above all, is theirs until the next."""
        ...

    def check(self) -> None:
        """Raises EngineFaultError once no further step can run. Does not block."""
        ...

    def warm_up(self) -> None:
        """Runs a small step so that the first request does not pay for set-up. Overwrites block 0: call before use."""
        ...


def scripted_token(last_token_id: int, position: int, seed: int, vocab_size: int) -> int:
    """The token that ScriptedExecutor puts at `position` after `last_token_id`: arbitrary but fixed."""
    return (last_token_id * 31 + position * 17 + seed * 7 + 11) % vocab_size


class ScriptedExecutor:
    """An executor without a model: its tokens are a function of the token before, the position and the seed.

    So a prefill side and a decode side continue one another without any KV. `next_token(last_token_id,
    position)` replaces the function where a test needs a certain output. `plans` are the plans executed so far.
    """

    def __init__(
        self,
        *,
        layout: KVLayout,
        num_blocks: int,
        vocab_size: int = 256,
        max_context_tokens: int = 8192,
        next_token: Callable[[int, int], int] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.attention = "scripted"
        self.plans: list[BatchPlan] = []
        self._next_token = next_token

    def execute(self, plan: BatchPlan, pause: Callable[[], None] | None = None) -> StepOutput:
        """Returns the scripted tokens; asserts that the plan is sound and that no two slices write to one block.

        Pauses once.
        """
        plan.assert_fits(block_size=self.layout.block_size, num_blocks=self.num_blocks)
        self._assert_writers_apart(plan)
        self.plans.append(plan)
        if pause is not None:
            pause()
        tokens = [None if piece.sampling is None else self._token(piece, piece.sampling) for piece in plan.slices]
        others = {
            piece.attempt_id: [
                self._token(piece, piece.sampling.of_choice(choice)) for choice in range(1, piece.num_choices)
            ]
            for piece in plan.slices
            if piece.sampling is not None and piece.num_choices > 1
        }
        return StepOutput(
            tokens=tokens,
            other_tokens=others,
            logprobs={
                (piece.attempt_id, choice): self._logprobs(each, piece.top_logprobs)
                for piece, token in zip(plan.slices, tokens, strict=True)
                if token is not None and piece.top_logprobs is not None
                for choice, each in enumerate([token, *others.get(piece.attempt_id, ())], piece.choice)
            },
            prompt_logprobs={
                piece.attempt_id: [self._logprobs(token_id, piece.scored.top) for token_id in piece.scored.token_ids]
                for piece in plan.slices
                if piece.scored is not None
            },
        )

    def rest(self) -> None:
        """Shares nothing."""

    def check(self) -> None:
        """Nothing to lose."""

    def warm_up(self) -> None:
        """Nothing to set up."""

    def _token(self, piece: SequenceSlice, sampling: SamplingParams) -> int:
        if self._next_token is not None:
            return self._next_token(piece.token_ids[-1], piece.end_position)
        seed = 0 if sampling.is_greedy else sampling.seed
        return scripted_token(piece.token_ids[-1], piece.end_position, seed, self.vocab_size)

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        """Made up: the token is the most likely one, those after it follow."""
        return TokenLogprobs(-0.5, tuple(((token_id + rank) % self.vocab_size, -0.5 - rank) for rank in range(top)))

    def _assert_writers_apart(self, plan: BatchPlan) -> None:
        writers: dict[int, str] = {}
        for piece in plan.slices:
            first = piece.start_position // self.layout.block_size
            last = (piece.end_position - 1) // self.layout.block_size
            for block_id in piece.block_table[first : last + 1]:
                assert block_id not in writers, (
                    f"block {block_id}: {writers[block_id]} and {piece.attempt_id} write to it"
                )
                writers[block_id] = piece.attempt_id
