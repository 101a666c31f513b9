"""`baton generate`: one answer, fit for a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cli.client import connect, printable
from baton.core.errors import InvalidArgumentError
from baton.v1.gateway_pb2 import ChatMessage

if TYPE_CHECKING:
    from typing import BinaryIO, TextIO

    from baton.v1.gateway_pb2 import GenerateRequest


def read_prompt(argument: str, stdin: BinaryIO) -> str:
    """The prompt: `argument`, or for `-` all of `stdin` without its last newline. Blocks until its end.

    InvalidArgumentError when it is not UTF-8.
    """
    if argument != "-":
        return argument
    try:
        return stdin.read().decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise InvalidArgumentError("prompt", "must be UTF-8 text") from None


def set_input(request: GenerateRequest, prompt: str, *, raw: bool, system: str | None) -> None:
    """Puts `prompt` into `request`: as the user's turn of a conversation, or `raw`, without any chat template."""
    if raw:
        request.text = prompt
        return
    if system is not None:
        request.messages.append(ChatMessage(role="system", content=system))
    request.messages.append(ChatMessage(role="user", content=prompt))


async def generate(address: str, request: GenerateRequest, stdout: TextIO) -> None:
    """Streams the answer to `stdout` and ends it with a newline. ServingError when it fails."""
    clean = printable if stdout.isatty() else str
    last = ""

    def write(text: str) -> None:
        nonlocal last
        last = text or last
        stdout.write(clean(text))
        stdout.flush()

    async with connect(address) as client:
        await client.stream(request, write)
    if not last.endswith("\n"):
        write("\n")
