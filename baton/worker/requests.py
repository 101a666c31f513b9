"""What both workers read in requests: wire values to plain data, with the errors that name field and limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.core.generation import SamplingParams, StopRule
from baton.core.model import ModelFingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.v1 import common_pb2

_MAX_ATTEMPT_ID_CHARS = 128
_MAX_TEMPERATURE = 100.0


def read_attempt_id(attempt_id: str) -> str:
    """The attempt's id, 1 to 128 characters."""
    if not 1 <= len(attempt_id) <= _MAX_ATTEMPT_ID_CHARS:
        raise InvalidArgumentError("attempt_id", f"must have 1 to {_MAX_ATTEMPT_ID_CHARS} characters")
    return attempt_id


def require_fingerprint(message: common_pb2.ModelFingerprint, ours: ModelFingerprint, *, worker_id: str) -> None:
    """Raises FailedPreconditionError when the gateway made the ids for another model. `dtype` is not compared."""
    for name in ("model", "tokenizer"):
        if not getattr(message, name):
            raise InvalidArgumentError(f"fingerprint.{name}", "must not be empty")
    theirs = ModelFingerprint(model=message.model, weights=message.weights, tokenizer=message.tokenizer, dtype="")
    ours.require_equal(theirs, ours=worker_id, theirs="the request")


def read_sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    """How tokens are chosen; an unset field takes its documented default."""
    default = SamplingParams()
    sampling = SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else default.temperature,
        top_k=message.top_k if message.HasField("top_k") else default.top_k,
        top_p=message.top_p if message.HasField("top_p") else default.top_p,
        min_p=message.min_p if message.HasField("min_p") else default.min_p,
        seed=message.seed if message.HasField("seed") else default.seed,
    )
    _require("sampling.temperature", 0 <= sampling.temperature <= _MAX_TEMPERATURE, f"from 0 to {_MAX_TEMPERATURE:g}")
    _require("sampling.top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1")
    _require("sampling.min_p", 0 <= sampling.min_p <= 1, "from 0 to 1")
    return sampling


def read_stop(max_tokens: int, stop_token_ids: Iterable[int], *, at_least: int) -> StopRule:
    """When the sequence ends; `max_tokens` must be `at_least` so many."""
    if max_tokens < at_least:
        raise InvalidArgumentError("max_tokens", f"must be at least {at_least}, is {max_tokens}")
    return StopRule(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids))


def require_in_context(num_prompt_tokens: int, max_tokens: int, *, max_context_tokens: int) -> None:
    """Raises OutOfRangeError when prompt and output together are longer than the context."""
    if num_prompt_tokens + max_tokens > max_context_tokens:
        raise OutOfRangeError(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens exceed the context of "
            f"{max_context_tokens} tokens",
            limit=max_context_tokens,
            reason="CONTEXT_EXCEEDED",
        )


def require_in_vocabulary(field: str, token_ids: Sequence[int], *, vocab_size: int) -> None:
    """Raises OutOfRangeError when an id is none of the model's."""
    if max(token_ids) >= vocab_size:
        raise OutOfRangeError(
            field,
            f"{max(token_ids)} is not below the vocabulary's size {vocab_size}",
            limit=vocab_size - 1,
            reason="TOKEN_OUT_OF_VOCABULARY",
        )


def require_in_pool(field: str, num_tokens: int, *, capacity_tokens: int) -> None:
    """Raises OutOfRangeError when a sequence would not fit into the pool even if it were alone."""
    if num_tokens > capacity_tokens:
        raise OutOfRangeError(
            field,
            f"the KV cache of {num_tokens} tokens does not fit into a pool of {capacity_tokens} tokens",
            limit=capacity_tokens,
            reason="KV_POOL_EXCEEDED",
        )


def _require(field: str, holds: bool, range_text: str) -> None:
    # NaN fails every comparison, so it ends here too.
    if not holds:
        raise InvalidArgumentError(field, f"must be {range_text}")
