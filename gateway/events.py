"""What a session tells its client, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.core.generation import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request has a place in the queue."""

    request_id: str
    model: str
    queue_class: str
    prompt_tokens: int
    queue_position: int
    predicted_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """A part of the prompt, the token at `first_position` first, with one entry of log-probabilities for each."""

    first_position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of one choice that became certain, and the tokens that were produced since its last delta.

    `logprobs` has one entry for each token, or none. `finish_reason` is set with the choice's last.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the request cost, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, in seconds; the wire's `Timings` says what each means."""

    tokenize_s: float
    queue_s: float
    prefill_s: float
    handover_s: float
    decode_s: float
    time_to_first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The generation is complete. `reason`, the first choice's, is None when its worker's is not known here."""

    reason: FinishReason | None
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | ScoredPrompt | Delta | Finished
