"""From `python -m component` to an exit code: settings, event loop, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING, TypeVar

import uvloop

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from baton.core.settings import ComponentSettings

Settings = TypeVar("Settings", bound="ComponentSettings")


def run_component(
    settings_type: type[Settings], serve: Callable[[Settings, asyncio.Event], Awaitable[None]], argv: Sequence[str]
) -> int:
    """Loads the settings and runs `serve(settings, stop)` on a uvloop; returns the process's exit code. Blocks.

    `stop` is set by the first SIGTERM or SIGINT: `serve` drains and returns, and the code is 0. A second signal ends
    the process at once, by that signal. A StartupError is one line on stderr and the code 1.
    """
    code = 0
    try:
        settings = settings_type.load(argv)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_until_signal(settings, serve))
    except* StartupError as group:
        for error in _leaves(group):
            print(f"{settings_type.class_name}: {error}", file=sys.stderr)
        code = 1
    return code


async def _serve_until_signal(settings: Settings, serve: Callable[[Settings, asyncio.Event], Awaitable[None]]) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if not stop.is_set():
            stop.set()
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await serve(settings, stop)


def _leaves(group: BaseExceptionGroup[StartupError]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
