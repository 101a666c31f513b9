"""`baton up`: the whole system on one machine, until it is told to end."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from baton.cli.board import Board
from baton.cli.client import connect, printable
from baton.cli.supervisor import Supervisor
from baton.cli.topology import plan
from baton.coordination.embedded import EmbeddedRedis
from baton.core.errors import ServingError, StartupError
from baton.v1.common_pb2 import StopConditions
from baton.v1.gateway_pb2 import ChatMessage, GenerateRequest
from kv_transfer.segment import reap_stale_segments

if TYPE_CHECKING:
    from rich.console import Console

    from baton.cli.topology import Launch, Topology
    from baton.core.clock import Clock

DEMO_PROMPT = "What is the capital of France, and what is it known for?"
DEMO_MAX_TOKENS = 128


async def run(launch: Launch, console: Console, clock: Clock) -> None:
    """Runs all components until SIGINT, SIGTERM or SIGHUP: the first drains, the second kills.

    Nothing is left when it returns or raises. StartupError when something cannot start or keeps dying.
    """
    redis = EmbeddedRedis()
    topology = plan(launch, redis)
    with Board(console, clock, topology.names) as board:
        supervisor = Supervisor(topology.stages, board, clock)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup
            loop.add_signal_handler(number, supervisor.request_stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                greeter = tasks.create_task(_greet(supervisor, board, topology, launch.demo))
                await supervisor.run()
                greeter.cancel()
        except* StartupError as group:
            raise group.exceptions[0] from None
        finally:
            redis.stop()
            reap_stale_segments()


async def _greet(supervisor: Supervisor, board: Board, topology: Topology, demo: bool) -> None:
    """Says how to go on once all is ready, after a sample chat if that is wanted."""
    await supervisor.wait_ready()
    board.settle()
    if demo:
        await _demonstrate(topology.address, board)
    board.note(f"{topology.model} is served at {topology.address}. Ctrl-C ends it.")


async def _demonstrate(address: str, board: Board) -> None:
    """One chat, streamed to standard output. A failure is shown and ends nothing."""
    request = GenerateRequest(
        messages=[ChatMessage(role="user", content=DEMO_PROMPT)], stop=StopConditions(max_tokens=DEMO_MAX_TOKENS)
    )
    request.sampling.temperature = 0.0

    def write(text: str) -> None:
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    try:
        write(f"\nyou> {DEMO_PROMPT}\n")
        async with connect(address) as client:
            stats = await client.stream(request, lambda text, _: write(text))
        write(f"\n\n({stats})\n\n")
    except ServingError as error:
        board.note(f"\nthe sample chat failed: {error.message}")
    except (OSError, UnicodeEncodeError) as error:
        board.note(f"the sample chat cannot be shown: {error}")
