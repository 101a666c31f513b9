"""From the wire's GenerateRequest to plain data, or to an error that names the field and its limit.

Malformed whatever the model: InvalidArgumentError. Beyond what this model can do: OutOfRangeError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.core.generation import StopRule
from baton.rpc.generation import read_logprob_options, read_sampling, read_structure
from gateway.tokenization import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.generation import LogprobOptions, SamplingParams, Structure
    from baton.v1 import common_pb2, gateway_pb2
    from gateway.served_model import ServedModel

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_PRIORITY = 10
MAX_MESSAGES = 4096
ROLES = ("system", "user", "assistant")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are."""

    ids: tuple[int, ...]


Prompt: TypeAlias = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request that is well formed. Only what depends on the prompt's length is still open: `StopRule`."""

    request_id: str
    priority: int
    num_choices: int
    prompt: Prompt
    echo: bool
    sampling: SamplingParams
    logprobs: LogprobOptions
    max_tokens: int | None
    min_tokens: int
    structure: Structure | None
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]

    def stop_rule(self, prompt_tokens: int, model: ServedModel) -> StopRule:
        """The rule for a prompt of that many tokens. OutOfRangeError when prompt or output exceed the context."""
        require_fitting_prompt(prompt_tokens, self.prompt, model)
        left = model.max_context_tokens - prompt_tokens
        if self.max_tokens is not None and self.max_tokens > left:
            raise OutOfRangeError(
                "stop.max_tokens",
                f"{self.max_tokens} is over the {left} that a prompt of {prompt_tokens} tokens leaves"
                f" of {model.max_context_tokens}",
                limit=left,
            )
        max_tokens = self.max_tokens if self.max_tokens is not None else min(model.default_max_tokens, left)
        if self.min_tokens > max_tokens:
            raise OutOfRangeError(
                "stop.min_tokens", f"{self.min_tokens} is over the request's max_tokens, {max_tokens}", limit=max_tokens
            )
        return StopRule(max_tokens=max_tokens, stop_token_ids=self.stop_token_ids, min_tokens=self.min_tokens)


def validate_generate(
    request: gateway_pb2.GenerateRequest, model: ServedModel, *, new_seed: int, max_choices: int
) -> GenerationRequest:
    """Checks all that can be checked before tokenization. `new_seed` is used when the client gives none."""
    model.require_name(request.model)
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidArgumentError("request_id", "must be 1 to 128 characters of [A-Za-z0-9._:-]")
    return GenerationRequest(
        request_id=request.request_id,
        priority=_priority(request.priority),
        num_choices=_num_choices(request, max_choices),
        prompt=_prompt(request, model),
        echo=_echo(request),
        sampling=read_sampling(request.sampling, default_seed=new_seed, vocab_size=model.vocab_size),
        logprobs=read_logprob_options(request.logprobs),
        max_tokens=_max_tokens(request.stop),
        min_tokens=request.stop.min_tokens,
        structure=_structure(request),
        stop_strings=_stop_strings(request.stop),
        stop_token_ids=_stop_token_ids(request.stop, model),
    )


def _num_choices(request: gateway_pb2.GenerateRequest, limit: int) -> int:
    if not request.HasField("n"):
        return 1
    if request.n == 0:
        raise InvalidArgumentError("n", "must be at least 1; it is 0")
    if request.n > limit:
        raise OutOfRangeError("n", f"{request.n} is over the {limit} outputs that a prompt may have", limit=limit)
    return request.n


def _priority(priority: int) -> int:
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidArgumentError("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]; it is {priority}")
    return priority


def validate_tokenize(request: gateway_pb2.TokenizeRequest, model: ServedModel) -> TextPrompt | ChatPrompt:
    """Checks a text or conversation that is only to be tokenized."""
    model.require_name(request.model)
    given = _exactly_one({"text": request.HasField("text"), "messages": bool(request.messages)})
    return _text_prompt(request.text, model) if given == "text" else _chat_prompt(request.messages, model)


def validate_detokenize(request: gateway_pb2.DetokenizeRequest, model: ServedModel) -> tuple[int, ...]:
    """Checks ids that are to become text. There may be none."""
    model.require_name(request.model)
    if len(request.token_ids) > model.max_context_tokens:
        raise OutOfRangeError(
            "token_ids",
            f"has {len(request.token_ids)} ids, the limit is {model.max_context_tokens}",
            limit=model.max_context_tokens,
        )
    return _known_ids("token_ids", request.token_ids, model)


def require_fitting_prompt(prompt_tokens: int, prompt: Prompt, model: ServedModel) -> None:
    """Raises when a prompt has no tokens, or so many that not one more fits into the context."""
    field = {TextPrompt: "text", ChatPrompt: "messages", TokenPrompt: "token_ids.ids"}[type(prompt)]
    limit = model.max_context_tokens - 1
    if prompt_tokens == 0:
        raise InvalidArgumentError(field, "the prompt is empty")
    if prompt_tokens > limit:
        raise OutOfRangeError(
            field,
            f"the prompt has {prompt_tokens} tokens; the context of {model.max_context_tokens} takes {limit}"
            " and one of output",
            limit=limit,
        )


def _prompt(request: gateway_pb2.GenerateRequest, model: ServedModel) -> Prompt:
    given = _exactly_one(
        {
            "text": request.HasField("text"),
            "messages": bool(request.messages),
            "token_ids": request.HasField("token_ids"),
        }
    )
    if given == "text":
        return _text_prompt(request.text, model)
    if given == "messages":
        return _chat_prompt(request.messages, model)
    # The length first: it bounds the work on each id.
    require_fitting_prompt(len(request.token_ids.ids), TokenPrompt(()), model)
    return TokenPrompt(_known_ids("token_ids.ids", request.token_ids.ids, model))


def _structure(request: gateway_pb2.GenerateRequest) -> Structure | None:
    structure = read_structure(request)
    if structure is not None and request.stop.min_tokens:
        raise InvalidArgumentError("stop.min_tokens", "must be 0 with a structure")
    return structure


def _echo(request: gateway_pb2.GenerateRequest) -> bool:
    if request.echo and request.messages:
        raise InvalidArgumentError("echo", "must be false with messages: a conversation has no one text")
    return request.echo


def _exactly_one(is_given: dict[str, bool]) -> str:
    given = [field for field, is_set in is_given.items() if is_set]
    names = ", ".join(is_given)
    if not given:
        raise InvalidArgumentError("text", f"exactly one of {names} must be set, none is", reason="NO_INPUT")
    if len(given) > 1:
        description = f"exactly one of {names} must be set; {' and '.join(given)} are"
        raise InvalidArgumentError(given[1], description, reason="AMBIGUOUS_INPUT")
    return given[0]


def _text_prompt(text: str, model: ServedModel) -> TextPrompt:
    if not text:
        raise InvalidArgumentError("text", "the prompt is empty")
    _require_fitting_chars("text", len(text), model)
    return TextPrompt(text)


def _chat_prompt(messages: Sequence[gateway_pb2.ChatMessage], model: ServedModel) -> ChatPrompt:
    if not model.has_chat_template:
        description = f"model {model.name!r} has no chat template; send text or token_ids"
        raise InvalidArgumentError("messages", description, reason="NO_CHAT_TEMPLATE")
    # Empty ones are without bound otherwise, and the template is Python's work for each.
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgumentError("messages", f"at most {MAX_MESSAGES}; there are {len(messages)}")
    _require_fitting_chars("messages", sum(len(message.content) for message in messages), model)
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            description = f"must be one of {', '.join(ROLES)}" + ("" if message.role else "; it is empty")
            raise InvalidArgumentError(f"messages[{index}].role", description)
    return ChatPrompt(tuple(ChatMessage(message.role, message.content) for message in messages))


def _require_fitting_chars(field: str, num_chars: int, model: ServedModel) -> None:
    """Refuses a text that is too long even if every token were the longest one, before any time goes into it."""
    limit = model.max_context_tokens * model.longest_token_chars
    if num_chars > limit:
        raise OutOfRangeError(field, f"has {num_chars} characters, the limit is {limit}", limit=limit)


def _known_ids(field: str, ids: Sequence[int], model: ServedModel) -> tuple[int, ...]:
    limit = model.vocab_size - 1
    if max(ids, default=0) > limit:
        index = next(index for index, token_id in enumerate(ids) if token_id > limit)
        raise OutOfRangeError(f"{field}[{index}]", f"{ids[index]} is over the vocabulary's {limit}", limit=limit)
    return tuple(ids)


def _max_tokens(stop: common_pb2.StopConditions) -> int | None:
    if not stop.HasField("max_tokens"):
        return None
    if stop.max_tokens < 1:
        raise InvalidArgumentError("stop.max_tokens", "must be at least 1; it is 0")
    if stop.min_tokens > stop.max_tokens:
        description = f"must be at most max_tokens, {stop.max_tokens}; it is {stop.min_tokens}"
        raise InvalidArgumentError("stop.min_tokens", description)
    return stop.max_tokens


def _stop_strings(stop: common_pb2.StopConditions) -> tuple[str, ...]:
    if len(stop.strings) > MAX_STOP_STRINGS:
        raise InvalidArgumentError("stop.strings", f"at most {MAX_STOP_STRINGS}; there are {len(stop.strings)}")
    for index, string in enumerate(stop.strings):
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            description = f"must have 1 to {MAX_STOP_STRING_CHARS} characters; it has {len(string)}"
            raise InvalidArgumentError(f"stop.strings[{index}]", description)
    return tuple(stop.strings)


def _stop_token_ids(stop: common_pb2.StopConditions, model: ServedModel) -> frozenset[int]:
    if len(stop.token_ids) > MAX_STOP_TOKEN_IDS:
        description = f"at most {MAX_STOP_TOKEN_IDS}; there are {len(stop.token_ids)}"
        raise InvalidArgumentError("stop.token_ids", description)
    ids = _known_ids("stop.token_ids", stop.token_ids, model)
    ending = frozenset(ids) | (frozenset() if stop.ignore_eos else model.eos_token_ids)
    if stop.min_tokens and len(ending) >= model.vocab_size:
        raise InvalidArgumentError("stop.min_tokens", "must be 0 where every token ends the generation")
    return ending
