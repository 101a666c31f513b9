"""`baton generate`: one answer, fit for a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cli.client import connect, printable
from baton.core.errors import InvalidArgumentError
from baton.v1.gateway_pb2 import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TextIO

    from baton.v1.common_pb2 import TokenLogprobs
    from baton.v1.gateway_pb2 import GenerateRequest


def read_prompt(argument: str, stdin: TextIO | None) -> str:
    """The prompt: `argument`, or for `-` all of `stdin` without its last newline. Blocks until its end.

    InvalidArgumentError when it is not UTF-8, whatever the locale, or closed.
    """
    if argument != "-":
        return argument
    if stdin is None:
        raise InvalidArgumentError("prompt", "standard input is closed")
    try:
        return stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            "prompt", f"must be UTF-8 text; byte {error.start} of standard input is none"
        ) from None


def set_input(request: GenerateRequest, prompt: str, *, raw: bool, system: str | None) -> None:
    """Puts `prompt` into `request`: as the user's turn of a conversation, or `raw`, without any chat template."""
    if raw:
        request.text = prompt
        return
    if system is not None:
        request.messages.append(ChatMessage(role="system", content=system))
    request.messages.append(ChatMessage(role="user", content=prompt))


async def generate(address: str, request: GenerateRequest, stdout: TextIO, stderr: TextIO) -> None:
    """Streams the answer to `stdout` and ends it with a newline. ServingError when it fails.

    Of several the first is streamed and the others follow, each under a line with its number. Log-probabilities that
    were asked for go to `stderr` afterwards, a line for each token.
    """
    clean = printable if stdout.isatty() else str
    last = ""
    heading = "--- 1 ---\n" if request.n > 1 else ""
    others: dict[int, list[str]] = {choice: [] for choice in range(1, request.n)}
    scores: list[str] = []

    def put(text: str) -> None:
        nonlocal last
        last = text or last
        stdout.write(clean(text))
        stdout.flush()

    def write(text: str, choice: int) -> None:
        nonlocal heading
        if choice:
            others[choice].append(text)
        else:  # a request that is refused has no heading
            put(heading + text)
            heading = ""

    def score(where: str, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> None:
        scores.extend(_describe(where, token_id, each) for token_id, each in zip(token_ids, logprobs, strict=False))

    def end_line() -> None:
        if not last.endswith("\n"):
            put("\n")

    async with connect(address) as client:
        await client.stream(request, write, score)
    write("", 0)
    end_line()
    for choice, texts in others.items():
        put(f"--- {choice + 1} ---\n")
        put("".join(texts))
        end_line()
    for line in scores:
        print(line, file=stderr)


def _describe(where: str, token_id: int, logprobs: TokenLogprobs) -> str:
    likeliest = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    others = ", ".join(f"{other} {value:.4f}" for other, value in likeliest)
    return f"{where} token {token_id}: {logprobs.logprob:.4f}" + (f" (likeliest: {others})" if others else "")
