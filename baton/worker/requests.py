"""What both workers read in requests: wire values to plain data, with the errors that name field and limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError, ResourceExhaustedError
from baton.core.fingerprint import is_fingerprint
from baton.core.generation import MAX_CHOICES, StopRule
from baton.core.model import ModelFingerprint
from baton.rpc import generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from baton.core.generation import Structure
    from baton.v1 import common_pb2, decode_pb2, prefill_pb2
    from baton.worker.start_up import EngineFacts

    RequestLimits: TypeAlias = prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest

_MAX_ATTEMPT_ID_CHARS = 128


def read_attempt_id(attempt_id: str) -> str:
    """The attempt's id, 1 to 128 characters."""
    if not 1 <= len(attempt_id) <= _MAX_ATTEMPT_ID_CHARS:
        raise InvalidArgumentError("attempt_id", f"must have 1 to {_MAX_ATTEMPT_ID_CHARS} characters")
    return attempt_id


def require_fingerprint(message: common_pb2.ModelFingerprint, ours: ModelFingerprint, *, worker_id: str) -> None:
    """Raises FailedPreconditionError when the gateway made the ids for another model. Numerics are not compared."""
    for name in ("model", "tokenizer"):
        if not getattr(message, name):
            raise InvalidArgumentError(f"fingerprint.{name}", "must not be empty")
    for name in ("weights", "tokenizer"):
        if (text := getattr(message, name)) and not is_fingerprint(text):
            raise InvalidArgumentError(f"fingerprint.{name}", "must be 32 lower-case hexadecimal digits")
    theirs = ModelFingerprint(
        model=message.model, weights=message.weights, tokenizer=message.tokenizer, dtype="", quantization=""
    )
    ours.require_equal(theirs, ours=worker_id, theirs="the request")


def read_stop(request: RequestLimits, *, at_least: int, vocab_size: int) -> StopRule:
    """When the sequence ends; `max_tokens` must be `at_least` so many."""
    if request.max_tokens < at_least:
        raise InvalidArgumentError("max_tokens", f"must be at least {at_least}, is {request.max_tokens}")
    if request.min_tokens > request.max_tokens:
        raise InvalidArgumentError(
            "min_tokens", f"must be at most max_tokens, {request.max_tokens}; it is {request.min_tokens}"
        )
    stop_token_ids = frozenset(request.stop_token_ids)
    if request.min_tokens and len(stop_token_ids) >= vocab_size:
        raise InvalidArgumentError("min_tokens", "must be 0 where every token ends the generation")
    return StopRule(max_tokens=request.max_tokens, stop_token_ids=stop_token_ids, min_tokens=request.min_tokens)


def read_num_choices(request: RequestLimits) -> int:
    """How many outputs a prompt is to have."""
    if request.num_choices > MAX_CHOICES:
        raise OutOfRangeError("num_choices", f"{request.num_choices} is over the {MAX_CHOICES}", limit=MAX_CHOICES)
    return request.num_choices or 1


def read_structure(request: RequestLimits, facts: EngineFacts) -> Structure | None:
    """The form of the output. FailedPreconditionError when the engine can hold it to none."""
    structure = generation.read_structure(request)
    if structure is None:
        return None
    if request.min_tokens:
        raise InvalidArgumentError("min_tokens", "must be 0 with a structure")
    if not facts.takes_structure:
        raise FailedPreconditionError("the model's tokenizer allows no structures", reason="STRUCTURE_UNSUPPORTED")
    return structure


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


def require_room(num_attempts: int, *, max_waiting: int) -> None:
    """Raises ResourceExhaustedError when a worker with so many attempts takes no more."""
    if num_attempts >= max_waiting:
        raise ResourceExhaustedError(
            f"{max_waiting} requests are inside the worker already",
            reason="WORKER_FULL",
            retry_after_s=1.0,
            metadata={"limit": str(max_waiting)},
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
