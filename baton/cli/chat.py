"""`baton chat`: a conversation at the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from baton.cli.client import GatewayClient, connect, printable
from baton.core.errors import InvalidArgumentError, ServingError
from baton.v1.gateway_pb2 import ChatMessage, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

HELP = """\
/reset   forget the conversation
/help    show this
Ctrl-C   stop the answer
Ctrl-D   end"""


class Conversation:
    """The turns so far. A turn that fails leaves no trace; one that is stopped keeps what was said."""

    def __init__(self, template: GenerateRequest) -> None:
        """`template` has everything but the turns; messages in it, such as a system message, open each conversation."""
        self._template = template
        self._turns: list[ChatMessage] = []

    def reset(self) -> None:
        """Forgets all turns."""
        self._turns.clear()

    async def say(self, client: GatewayClient, text: str, write: Callable[[str], None]) -> str:
        """Says `text`, hands the answer to `write` as it comes, returns its statistics as a line.

        ServingError when it fails. Cancelling it stops the answer.
        """
        turn = ChatMessage(role="user", content=text)
        request = GenerateRequest()
        request.CopyFrom(self._template)
        request.messages.extend([*self._turns, turn])
        answer: list[str] = []

        def take(piece: str, _choice: int) -> None:
            answer.append(piece)
            write(piece)

        try:
            stats = await client.stream(request, take)
        except asyncio.CancelledError:
            if answer:
                self._turns += [turn, ChatMessage(role="assistant", content="".join(answer))]
            raise
        self._turns += [turn, ChatMessage(role="assistant", content="".join(answer))]
        return str(stats)


def chat(address: str, template: GenerateRequest, console: Console) -> bool:
    """Reads turns and streams answers until the end of the input. Whether all was well, as far as nobody watched.

    Failures are told at the terminal; without one on standard error, and then the result is False.
    InvalidArgumentError when the input is not UTF-8 or is closed.
    """
    if sys.stdin is None:
        raise InvalidArgumentError("chat", "standard input is closed")
    is_watched, num_failed = sys.stdin.isatty(), 0
    _enable_line_editing()
    console.print("Ctrl-C stops an answer, Ctrl-D ends, /help shows more.", style="dim", highlight=False)
    conversation = Conversation(template)
    with asyncio.Runner() as runner:
        channel = connect(address)
        client = runner.run(channel.__aenter__())
        try:
            while (text := _read_turn(console)) is not None:
                if text.startswith("/"):
                    _command(text, conversation, console)
                elif text:
                    failure = _answer(runner, client, conversation, text, console)
                    if failure is not None and is_watched:
                        console.print(failure.message, style="red", markup=False, highlight=False)
                    elif failure is not None:
                        print(f"baton: {failure}", file=sys.stderr)
                        num_failed += 1
        finally:
            runner.run(channel.__aexit__(None, None, None))
    return num_failed == 0


def _read_turn(console: Console) -> str | None:
    """The next line, empty after Ctrl-C; None at the end of the input."""
    try:
        text = input("you> ").strip()
        text.encode()  # bytes that are not UTF-8 arrive as surrogates in some locales
        return text
    except UnicodeError:
        raise InvalidArgumentError("chat", "standard input must be UTF-8 text") from None
    except KeyboardInterrupt:
        console.print()
        return ""
    except EOFError:
        console.print()
        return None


def _command(text: str, conversation: Conversation, console: Console) -> None:
    if text == "/reset":
        conversation.reset()
        console.print("forgotten", style="dim")
    elif text == "/help":
        console.print(HELP, highlight=False)
    else:
        console.print(f"no such command: {text}; /help shows all", style="red", markup=False, highlight=False)


def _answer(
    runner: asyncio.Runner, client: GatewayClient, conversation: Conversation, text: str, console: Console
) -> ServingError | None:
    """Streams one answer; returns what kept it from being whole."""

    def write(piece: str) -> None:
        console.out(printable(piece), end="", highlight=False)

    try:
        stats = runner.run(conversation.say(client, text, write))
    except KeyboardInterrupt:  # the runner has cancelled the call
        console.print("\n(stopped)", style="dim", highlight=False)
    except ServingError as error:
        return error
    else:
        console.print(f"\n({stats})", style="dim", highlight=False)
    return None


def _enable_line_editing() -> None:
    """Makes `input` edit lines and remember them, where Python was built with readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
