"""What a session tells its client, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.core.generation import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The request has a place in the queue."""

    request_id: str
    model: str
    queue_class: str
    prompt_tokens: int
    queue_position: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became certain, and the tokens that were produced since the last delta."""

    text: str
    token_ids: tuple[int, ...] = ()


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
    """The generation is complete. `reason` is None when the worker gave one that this gateway does not know."""

    reason: FinishReason | None
    usage: Usage
    timings: Timings


Event: TypeAlias = Accepted | Delta | Finished
