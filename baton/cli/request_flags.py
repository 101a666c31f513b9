"""The flags that say what is asked of the model, for every command that asks."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_type_hints

import typer

from baton.core.errors import StartupError
from baton.v1.common_pb2 import SamplingParams, StopConditions, Structure
from baton.v1.gateway_pb2 import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_ADDRESS = "127.0.0.1:8470"
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1
_OR_FILE = " @FILE reads it from a file."


def _check_address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    # gRPC names such as unix:/path and dns:///host:port are its own matter.
    if not (colon and host and (port.isdecimal() or "/" in value)):
        raise typer.BadParameter(f"must be host:port, not {value!r}")
    return value


Address = Annotated[str, typer.Option(help="The gateway's host:port.", callback=_check_address)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """The values that were given; the gateway checks their ranges."""

    address: Address = DEFAULT_ADDRESS
    model: Annotated[str, typer.Option(help="Name of the model; needed when there are several.")] = ""
    system: Annotated[str | None, typer.Option(help="System message that opens the conversation.")] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, max=UINT32_MAX, help="Most tokens of an answer.")] = None
    min_tokens: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Fewest tokens of an answer.")] = None
    temperature: Annotated[float | None, typer.Option(help="Divides the logits; 0: always the likeliest token.")] = None
    top_k: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX, help="Keep the k likeliest tokens; 0: all.")] = (
        None
    )
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this share as likely as the likeliest.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens of prompt and answer become less likely.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Taken from a token's logit for each time the answer has it.")
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Taken from the logit of each token that the answer has.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to a token's logit. May be repeated.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, max=UINT64_MAX, help="The same seed gives the same answer.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this text. May be repeated.")] = None
    stop_token_id: Annotated[
        list[int] | None, typer.Option(min=0, max=UINT32_MAX, help="End at this token. May be repeated.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")] = False
    json_schema: Annotated[
        str | None, typer.Option(metavar="SCHEMA", help=f"The answer is JSON of this schema.{_OR_FILE}")
    ] = None
    regex: Annotated[str | None, typer.Option(help=f"The answer matches this regular expression.{_OR_FILE}")] = None
    grammar: Annotated[str | None, typer.Option(help=f"The answer is of this Lark-like grammar.{_OR_FILE}")] = None

    def request(self) -> GenerateRequest:
        """The request, without its input and the system message. Blocks for a file that a flag names.

        BadParameter and StartupError when a flag cannot be read.
        """
        request = GenerateRequest(
            model=self.model,
            sampling=SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                seed=self.seed,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                logit_bias=dict(map(_read_bias, self.logit_bias or [])),
            ),
            stop=StopConditions(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                strings=self.stop or [],
                token_ids=self.stop_token_id or [],
                ignore_eos=self.ignore_eos or None,
            ),
        )
        if any(text is not None for text in (self.json_schema, self.regex, self.grammar)):
            form = Structure(
                json_schema=_read_text(self.json_schema), regex=_read_text(self.regex), grammar=_read_text(self.grammar)
            )
            request.structure.CopyFrom(form)
        return request


def takes_request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, whose parameter `flags` is a `RequestFlags`, as a function that has its fields as parameters."""
    hints = get_type_hints(RequestFlags, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(RequestFlags)
    ]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=keyword, annotation=own_hints[name])
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "flags"
    ]

    @functools.wraps(command)
    def run(**given: object) -> None:
        values = {field.name: given.pop(field.name) for field in fields(RequestFlags)}
        command(**given, flags=RequestFlags(**values))  # type: ignore[arg-type]

    parameters = [*own, *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _read_bias(text: str) -> tuple[int, float]:
    token_id, separator, value = text.partition("=")
    try:
        bias = int(token_id), float(value)
    except ValueError:
        bias = -1, 0.0
    if not separator or not 0 <= bias[0] <= UINT32_MAX:
        raise typer.BadParameter(f"{text!r} is not ID=VALUE", param_hint="--logit-bias")
    return bias


def _read_text(value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    file = Path(value.removeprefix("@"))
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise StartupError(f"{file}: is not UTF-8 text") from None
