"""The handle that an asyncio server has on its engine process. Imports no torch.

A forward pass would hold up every stream of the event loop's process, so it runs in a process of its own; plain
data passes between the two, over one socket:

    server process                                          engine process
    EngineProcess.send(command) ──bounded, never blocks──▶  ChildChannel.poll_commands(timeout_s)
    async for batch in events() ◀──one batch a step───────  ChildChannel.emit(events)

The engine process is a fresh interpreter (as with multiprocessing's `spawn`, less its tracker process and its second
import of the parent's main module). It ends when told to, and soon after its parent, whatever happens to that.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from baton.core.errors import ResourceExhaustedError, StartupError, UnavailableError
from baton.engine.channel import Begin, CommandT, Decoder, Events, EventT, Failed, Ready, Stop, encode
from baton.engine.spawn import how_it_ended, signal_name, spawn, start_failure

if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import AsyncIterator, Callable, Sequence

    from baton.engine.channel import ChildChannel

SpecT = TypeVar("SpecT")

_MAX_UNSENT_BYTES = 16 * 1024 * 1024
_MAX_BATCHES = 1024
# From the exit of the child to the end of what it wrote, and the other way round.
_LAST_WORDS_S = 1.0
_EXIT_AFTER_EOF_S = 10.0


class _WhenFull(Enum):
    """What is done with batches beyond the bound that nobody has read yet."""

    PAUSE = "the socket is not read, so the engine waits"
    DROP = "they are dropped: the engine is to end, and must not wait for a reader that may be gone"
    KEEP = "they are kept: the engine is no more, so only what the socket still holds can come"


class EngineDiedError(UnavailableError):
    """The engine process ended without being told to. One of `exit_code` and `signal_name` says how."""

    default_reason = "ENGINE_DIED"

    def __init__(self, name: str, returncode: int, cause: str = "") -> None:
        self.exit_code = returncode if returncode >= 0 else None
        self.signal_name = signal_name(-returncode) if returncode < 0 else None
        super().__init__(f"the {name} process {how_it_ended(returncode)}" + (f" ({cause})" if cause else ""))


class EngineProcess(Generic[CommandT, EventT]):
    """A running engine process. Made by `start`; belongs to the event loop that made it.

    Whoever started it calls `stop`, also after it died.
    """

    def __init__(self, child: subprocess.Popen[bytes], connection: socket.socket, name: str) -> None:
        self.facts: Any = None
        self._child = child
        self._connection = connection
        self._name = name
        self._link = _Link(self._on_end_of_stream)
        self._stop_sent = False
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(
        cls,
        target: Callable[[ChildChannel[CommandT, EventT], SpecT], None],
        spec: SpecT,
        *,
        name: str = "engine",
        words: Sequence[str] = (),
        start_timeout_s: float = 600.0,
    ) -> EngineProcess[CommandT, EventT]:
        """Starts `target(channel, spec)` in a new process and waits until it calls `channel.ready(facts)`.

        `target` is a function at the top of a module, `spec` picklable. `name` stands in errors, `words` in the list
        of processes. StartupError carries the one line that the
        child raised as StartupError, or says how it ended. When this call fails or is cancelled no process is left.
        """
        first_message = encode(Begin(target, spec))
        engine = cls(*spawn(name, words), name)
        try:
            async with asyncio.timeout(start_timeout_s):
                await engine._begin(first_message)
        except TimeoutError:
            await engine._kill()
            raise StartupError(f"the {name} process was not ready within {start_timeout_s:g} s") from None
        except BaseException:
            await engine._kill()
            raise
        if not engine._link.is_ready:
            await engine.stop(_EXIT_AFTER_EOF_S)
            raise StartupError(engine._link.failure or start_failure(name, engine._child.returncode))
        engine.facts = engine._link.facts
        return engine

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return not self._exited.is_set()

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._child.pid

    def send(self, command: CommandT, *, is_control: bool = False) -> None:
        """Hands `command` over; it arrives in order, once. Never blocks.

        ResourceExhaustedError when the engine has not read so much of what was sent before that no more may wait.
        Commands that end or extend work already accepted are `is_control`: they have as much room again, so that
        a full buffer can't stop an abort. EngineDiedError when the process is no more.
        """
        if self._exited.is_set():
            raise self._death()
        message = encode(command)
        limit_bytes = _MAX_UNSENT_BYTES * (2 if is_control else 1)
        if self._link.unsent_bytes + len(message) > limit_bytes:
            raise ResourceExhaustedError(
                f"the {self._name} process does not keep up with what it is sent",
                reason="ENGINE_BEHIND",
                retry_after_s=1.0,
            )
        self._link.write(message)

    async def events(self) -> AsyncIterator[list[EventT]]:
        """The batches that the engine emits, each once, for one reader.

        Ends after `stop`; raises EngineDiedError when the process ends by itself, after its last batch. While nobody
        reads, a bounded number of batches is kept and then the engine waits in `emit`.
        """
        while (batch := await self._link.next_batch()) is not None:
            yield batch
        await self._exited.wait()
        if not self._stop_sent:
            raise self._death()

    async def stop(self, grace_s: float) -> None:
        """Tells the engine to unwind, waits up to `grace_s`, then kills it. No process is left; may be called again.

        Batches that arrive from now on are dropped when nobody reads them in time. Cancelling this call
        kills the process at once.
        """
        try:
            if not self._stop_sent:
                self._stop_sent = True
                self._link.read_on(_WhenFull.DROP)
                self._link.write(encode(Stop()))
            async with asyncio.timeout(grace_s):
                await self._exited.wait()
        except TimeoutError:
            pass
        finally:
            await self._kill()

    async def _begin(self, first_message: bytes) -> None:
        """Says what to run, and waits for the first answer or for the end of the stream."""
        await self._loop.create_unix_connection(lambda: self._link, sock=self._connection)
        self._link.write(first_message)
        await self._link.answered.wait()

    async def _kill(self) -> None:
        """Makes sure that the process is no more, that it is reaped, and that the socket is closed."""
        if not self._exited.is_set():
            self._child.kill()
        await asyncio.shield(self._wait_closed())

    async def _wait_closed(self) -> None:
        await self._exited.wait()
        await self._link.closed.wait()

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._child.wait()
        self._exited.set()
        # What the child wrote last is still in the socket. A process that it left behind may hold that open.
        if self._link.when_full is _WhenFull.PAUSE:
            self._link.read_on(_WhenFull.KEEP)
        self._loop.call_later(_LAST_WORDS_S, self._close)

    def _on_end_of_stream(self) -> None:
        """The child has closed its end: it is about to exit, or hangs on the way."""
        self._loop.call_later(_EXIT_AFTER_EOF_S, self._child.kill)  # nothing once it was reaped

    def _close(self) -> None:
        self._link.close()
        self._connection.close()

    def _death(self) -> EngineDiedError:
        return EngineDiedError(self._name, self._child.returncode, self._link.failure)


class _Link(asyncio.Protocol):
    """The parent's end of the socket: what was sent and not read, what was read and not taken."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.answered = asyncio.Event()
        self.closed = asyncio.Event()
        self.is_ready = False
        self.facts: Any = None
        self.failure = ""
        self.when_full = _WhenFull.PAUSE
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder()
        self._batches: deque[list[Any]] = deque()
        self._news = asyncio.Event()
        self._is_paused = False

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def write(self, data: bytes) -> None:
        """Queues `data`; dropped when the stream has ended."""
        if self._transport and not self._transport.is_closing():
            self._transport.write(data)

    async def next_batch(self) -> list[Any] | None:
        """The oldest batch that nobody took; None once the stream has ended and all are taken."""
        while not self._batches:
            if self.closed.is_set():
                return None
            self._news.clear()
            await self._news.wait()
        batch = self._batches.popleft()
        if self._is_paused and len(self._batches) <= _MAX_BATCHES // 2:
            self._resume()
        return batch

    def read_on(self, when_full: _WhenFull) -> None:
        """Never waits for the reader of `events` any more; `when_full` says what becomes of the rest."""
        self.when_full = when_full
        if self._is_paused:
            self._resume()

    def close(self) -> None:
        """Drops what is unsent and unread."""
        if self._transport:
            self._transport.abort()
        else:
            self.closed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is watched by the loop from now on."""
        # Not isinstance: uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Sorts what the child wrote."""
        for message in self._decoder.feed(data):
            match message:
                case Events(batch):
                    self._add(batch)
                case Ready(facts):
                    self.facts = facts
                    self.is_ready = True
                    self.answered.set()
                case Failed(line):
                    self.failure = line
                    self.answered.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream has ended."""
        self.closed.set()
        self.answered.set()
        self._news.set()
        self._on_end()

    def _add(self, batch: list[Any]) -> None:
        is_full = len(self._batches) >= _MAX_BATCHES
        if is_full and self.when_full is _WhenFull.DROP:
            return
        self._batches.append(batch)
        self._news.set()
        if is_full and self.when_full is _WhenFull.PAUSE and not self._is_paused:
            assert self._transport
            self._transport.pause_reading()
            self._is_paused = True

    def _resume(self) -> None:
        assert self._transport
        self._is_paused = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
