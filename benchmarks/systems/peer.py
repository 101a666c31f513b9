"""A peer as a running system: a process in its own environment, driven over a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.load import RequestFailedError
from benchmarks.systems.system import CannotRunError, System, log_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.workload import Request

# vLLM compiles when it starts: minutes, many of them on a busy machine.
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0
# One line holds a prompt of tens of thousands of ids.
MAX_LINE_BYTES = 4 * 1024 * 1024


class PeerClient:
    """Requests and their tokens over the pipe of one peer process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._streams: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._next_id = 0

    async def generate(self, request: Request) -> AsyncIterator[int]:
        """See `Client`."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        # At most one message a token.
        messages = self._streams[request_id] = asyncio.Queue(request.max_tokens + 2)
        body = {"id": request_id, "prompt": list(request.prompt), "max_tokens": request.max_tokens}
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(body).encode() + b"\n")
            await pipe.drain()
            while not (message := await messages.get()).get("done"):
                if "error" in message:
                    raise RequestFailedError(message["error"])
                yield message["tokens"]
        except ConnectionError as error:
            raise RequestFailedError("the peer has ended") from error
        finally:
            del self._streams[request_id]

    async def read(self) -> None:
        """Deals messages out until the peer ends; then every running request fails."""
        pipe = self._process.stdout
        assert pipe is not None
        while line := await pipe.readline():
            message = json.loads(line)
            stream = self._streams.get(message.get("id"))
            if stream is not None:
                stream.put_nowait(message)
        for stream in self._streams.values():
            stream.put_nowait({"error": "the peer has ended"})


@asynccontextmanager
async def running_peer(name: str, python: Path, module: str, arguments: Sequence[str]) -> AsyncIterator[System]:
    """Starts `module` of benchmarks/peers; yields it when it is ready. CannotRunError has its own words."""
    if not os.access(python, os.X_OK):
        raise CannotRunError(f"its environment is missing: `make peers` makes it ({python})")
    log = log_file(name)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(python),
            *("-m", f"benchmarks.peers.{module}", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=output,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
    try:
        configuration = await _wait_ready(process, log)
        client = PeerClient(process)
        # Not in a task group: that would wrap what the caller's block raises.
        reader = asyncio.ensure_future(client.read())
        try:
            yield System(name=name, client=client, configuration=configuration)
        finally:
            reader.cancel()
    finally:
        await _stop(process)


async def _wait_ready(process: asyncio.subprocess.Process, log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        raise CannotRunError(f"not ready after {START_TIMEOUT_S:.0f} s: see {log}") from None
    if not line:
        raise CannotRunError(f"ended with {await process.wait()} before it was ready: {_last_line(log)}")
    message = json.loads(line)
    if "error" in message:
        raise CannotRunError(message["error"].strip().splitlines()[0])
    configuration: dict[str, Any] = message["ready"]
    return configuration


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Lets the peer end by itself, then kills it, and with it whatever it started: it leads a session of its own."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
