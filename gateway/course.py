"""What the attempts at one request have in common: its outputs, and what its client has been told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from baton.core.generation import FinishReason
    from gateway.events import Delta, Event, ScoredPrompt
    from gateway.output import Output
    from gateway.phases import Phases
    from gateway.progress import Progress
    from gateway.worker_calls import Attempt
    from gateway.worker_events import NewTokens, PromptDone

Emit: TypeAlias = "Callable[[Event], Awaitable[None]]"


@dataclass(slots=True, kw_only=True)
class Course:
    """One request's, with an output for each choice, in their order. Nothing is told twice, whoever computes it.

    `cached_tokens` are those of the prompt that the first attempt found computed.
    """

    outputs: Sequence[Output]
    progress: Progress
    phases: Phases
    emit: Emit
    remaining_s: Callable[[], float]
    queue_timeout_s: float
    prefix_names: Sequence[bytes]
    cached_tokens: int = 0
    next_scored: int = 1

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(len(output.token_ids) for output in self.outputs)

    def open_outputs(self, attempt: Attempt) -> list[Output]:
        """Of the outputs that an attempt makes those that are not complete."""
        return [output for output in self.outputs if output.choice in attempt.choices and not output.is_over]

    async def take_first(self, done: PromptDone) -> None:
        """Takes the first tokens of an attempt."""
        if self.num_output_tokens:
            for tokens in done.first_tokens:
                await self.take(tokens)
            return
        self.cached_tokens = done.cached_tokens
        self.progress.first_token(len(done.first_tokens))
        for tokens in done.first_tokens:
            await self.emit(self._push(tokens))

    async def take(self, tokens: NewTokens) -> bool:
        """Takes more tokens of an output, unless it is over; whether a stop string in them has ended it."""
        if self.outputs[tokens.choice].is_over:
            return False
        delta = self._push(tokens)
        self.progress.tokens(len(delta.token_ids), tokens.choice)
        await self.emit(delta)
        return delta.finish_reason is not None and tokens.finish_reason is None

    async def finish_outputs(self, attempt: Attempt, reason: FinishReason | None) -> None:
        """Ends the outputs of an attempt that no more tokens come for; `reason` is what their worker said."""
        for output in self.open_outputs(attempt):
            delta = output.finish(reason)
            if delta.text or delta.finish_reason:
                await self.emit(delta)

    async def tell_scores(self, scored: ScoredPrompt) -> None:
        """Emits what no earlier attempt has scored."""
        num_known = self.next_scored - scored.first_position
        self.next_scored = max(self.next_scored, scored.first_position + len(scored.token_ids))
        if num_known < len(scored.token_ids):
            await self.emit(
                replace(
                    scored,
                    first_position=scored.first_position + num_known,
                    token_ids=scored.token_ids[num_known:],
                    logprobs=scored.logprobs[num_known:],
                )
            )

    def _push(self, tokens: NewTokens) -> Delta:
        return self.outputs[tokens.choice].push(tokens.ids, tokens.logprobs, tokens.finish_reason)
