"""The wire's sampling parameters and log-probabilities, read and written: one place knows their limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, TypeAlias

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.core.generation import LogprobOptions, SamplingParams, Structure, StructureKind, TokenLogprobs
from baton.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.v1 import decode_pb2, gateway_pb2, prefill_pb2

    HasStructure: TypeAlias = gateway_pb2.GenerateRequest | prefill_pb2.PrefillRequest | decode_pb2.DecodeRequest

MAX_LOGIT_BIASES = 300
MAX_TOP_LOGPROBS = 20
MAX_STRUCTURE_CHARS = 65_536
_Ranged: TypeAlias = Literal["temperature", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]

# All limits are exact in the wire's 32-bit floats.
_RANGES: dict[_Ranged, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.125, 8.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
}
_BIAS_RANGE = (-100.0, 100.0)


def read_sampling(message: common_pb2.SamplingParams, *, default_seed: int, vocab_size: int) -> SamplingParams:
    """The parameters; an unset field takes its documented default.

    InvalidArgumentError names a field outside its range, OutOfRangeError a token that is not in the vocabulary.
    """
    default = SamplingParams()
    values = {name: getattr(message if message.HasField(name) else default, name) for name in _RANGES}
    for name, value in values.items():
        _require_range(f"sampling.{name}", value, _RANGES[name])
    top_p = message.top_p if message.HasField("top_p") else default.top_p
    if not 0.0 < top_p <= 1.0:
        raise InvalidArgumentError("sampling.top_p", _range_text(top_p, "(0, 1]"))
    return SamplingParams(
        top_k=message.top_k,
        top_p=top_p,
        seed=message.seed if message.HasField("seed") else default_seed,
        logit_bias=_read_logit_bias(message.logit_bias, vocab_size),
        **values,
    )


def sampling_message(sampling: SamplingParams) -> common_pb2.SamplingParams:
    """The wire's form of sampling parameters, every field set."""
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
    )


def read_logprob_options(message: common_pb2.LogprobOptions) -> LogprobOptions:
    """Which log-probabilities are wanted. InvalidArgumentError when too many are."""
    return LogprobOptions(
        output_top=read_top("logprobs.output_top", message.output_top if message.HasField("output_top") else None),
        prompt_top=read_top("logprobs.prompt_top", message.prompt_top if message.HasField("prompt_top") else None),
    )


def read_top(field: str, top: int | None) -> int | None:
    """How many of the most likely tokens are wanted; None stands for no log-probabilities at all."""
    if top is not None and top > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError(field, f"must be in [0, {MAX_TOP_LOGPROBS}]; it is {top}")
    return top


def logprob_options_message(options: LogprobOptions) -> common_pb2.LogprobOptions:
    """The wire's form of what is wanted."""
    return common_pb2.LogprobOptions(output_top=options.output_top, prompt_top=options.prompt_top)


def logprobs_message(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """The wire's form of one token's log-probabilities."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def read_logprobs(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """One token's log-probabilities."""
    return TokenLogprobs(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


def read_structure(request: HasStructure) -> Structure | None:
    """The form that the output must have, well formed or not; None: any.

    InvalidArgumentError unless there is exactly one, not too long.
    """
    if not request.HasField("structure"):
        return None
    message = request.structure
    given = [kind for kind in StructureKind if message.HasField(kind.value)]
    if len(given) != 1:
        names = ", ".join(kind.value for kind in StructureKind)
        raise InvalidArgumentError("structure", f"exactly one of {names} must be set; {len(given)} are")
    structure = Structure(given[0], getattr(message, given[0].value))
    if len(structure.text) > MAX_STRUCTURE_CHARS:
        description = f"at most {MAX_STRUCTURE_CHARS} characters; there are {len(structure.text)}"
        raise InvalidArgumentError(structure.kind.field, description)
    return structure


def structure_message(structure: Structure | None) -> common_pb2.Structure | None:
    """The wire's form of a structure."""
    return None if structure is None else common_pb2.Structure(**{structure.kind.value: structure.text})


def _read_logit_bias(biases: Mapping[int, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidArgumentError("sampling.logit_bias", f"at most {MAX_LOGIT_BIASES} ids; there are {len(biases)}")
    for token_id, bias in sorted(biases.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocab_size:
            limit = vocab_size - 1
            raise OutOfRangeError(
                field, f"is over the vocabulary's {limit}", limit=limit, reason="TOKEN_OUT_OF_VOCABULARY"
            )
        _require_range(field, bias, _BIAS_RANGE)
    return tuple(sorted(biases.items()))


def _require_range(field: str, value: float, limits: tuple[float, float]) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not limits[0] <= value <= limits[1]:
        raise InvalidArgumentError(field, _range_text(value, f"[{limits[0]:g}, {limits[1]:g}]"))


def _range_text(value: float, allowed: str) -> str:
    shown = f"{value:.6g}" if math.isfinite(value) else str(value)
    return f"must be in {allowed}; it is {shown}"
