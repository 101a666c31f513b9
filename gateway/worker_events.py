"""What workers tell of an attempt, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from baton.core.generation import FinishReason, TokenLogprobs
    from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of a choice in order, its next positions; `logprobs` for each, or none.

    `finish_reason` is set when they are its last.
    """

    choice: int
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDone:
    """A prefill's result: the first token of each choice, in order.

    `kv` goes to the decode worker as it is; None when no choice goes on after its first token.
    """

    first_tokens: tuple[NewTokens, ...]
    kv: kv_transfer_pb2.KvDescriptor | None
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class GrowingCache:
    """The first chunk of a longer prompt is computed: `kv` goes to the decode worker, which copies it as it grows."""

    kv: kv_transfer_pb2.KvDescriptor


@dataclass(frozen=True, slots=True)
class Handover:
    """The decode worker has the KV cache."""

    transport: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """Every choice ended by a token or by its length, the last one for `reason`."""

    reason: FinishReason | None


DecodeEvent: TypeAlias = NewTokens | DecodeEnd
