"""What an engine process sees of the process that started it, and how messages lie on the socket between them.

Each message is a pickled object behind its length. Both ends are ours and the socket has no name, so nobody else can
write to it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from baton.core.errors import EngineFaultError, StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")

# How long an orphan may take to give back what it holds, a shared memory segment above all.
ORPHAN_GRACE_S = 3.0

_LENGTH = struct.Struct("!I")
_READ_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Begin:
    """Parent to child, first: what to run."""

    target: Callable[[ChildChannel[Any, Any], Any], None]
    spec: object


@dataclass(frozen=True, slots=True)
class Stop:
    """Parent to child: unwind and exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: start-up is over. `facts` is the target's own."""

    facts: object


@dataclass(frozen=True, slots=True)
class Failed:
    """Child to parent, last: why the target ended by an exception."""

    line: str


@dataclass(frozen=True, slots=True)
class Events:
    """Child to parent: what one step brought about."""

    batch: list[Any]


def encode(message: object) -> bytes:
    """One message as bytes for the socket."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(pickle.loads(memoryview(self._buffer)[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


class ChildChannel(Generic[CommandT, EventT]):
    """The engine loop's side: `ready` once, then drain commands, plan, execute, emit, until `is_stopping`.

    Used by the thread that runs the loop; only `wake` may be called from others. Commands that nobody polled yet wait
    in the parent, within its bound.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = Decoder()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._watched_fds: set[int] = set()
        self.is_ready = False
        self.is_stopping = False

    def ready(self, facts: object = None) -> None:
        """Says that start-up is over. `facts`: plain data that the parent reads as `EngineProcess.facts`."""
        self.is_ready = True
        self._send(Ready(facts))

    def poll_commands(self, timeout_s: float | None) -> list[CommandT]:
        """The commands that arrived since the last call, in order; waits for the first one up to `timeout_s`.

        0 only looks, None waits for ever. Returns [] early after `wake`, while something watched is readable, and once
        `is_stopping`: the parent asked for the end, or is no more.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        commands: list[CommandT] = []
        while not commands and not self.is_stopping:
            wait_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1000
            ready_fds = {fd for fd, _ in self._poll.poll(wait_ms)}
            if self._socket.fileno() in ready_fds:
                commands = self._receive()
            if self._wake_fd in ready_fds:
                os.eventfd_read(self._wake_fd)
                break
            if not ready_fds or ready_fds & self._watched_fds:
                break
        return commands

    def watch(self, descriptor: int) -> None:
        """Lets `poll_commands` return early while `descriptor` is readable: a pidfd, say, whose process has ended."""
        self._watched_fds.add(descriptor)
        self._poll.register(descriptor, select.POLLIN)

    def emit(self, events: Sequence[EventT]) -> None:
        """Sends one batch of picklable events; nothing for an empty one.

        Blocks while the parent is so far behind that its buffers are full. Once the parent is no more the batch
        is dropped and `is_stopping` is set.
        """
        if events:
            self._send(Events(list(events)))

    def wake(self) -> None:
        """Ends a waiting `poll_commands`, or the next one. For any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def fail(self, line: str) -> None:
        """Tells the parent why the process ends."""
        self._send(Failed(line))

    def close(self) -> None:
        """Ends the stream, which the parent sees. `wake` stays harmless."""
        self._socket.close()

    def _receive(self) -> list[CommandT]:
        """All complete messages that the socket holds, without waiting."""
        commands: list[CommandT] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except ConnectionError:
                data = b""
            if not data:
                self.is_stopping = True
                return commands
            for message in self._decoder.feed(data):
                if isinstance(message, Stop):
                    self.is_stopping = True
                else:
                    commands.append(message)

    def _send(self, message: object) -> None:
        try:
            self._socket.sendall(encode(message))
        except ConnectionError:
            self.is_stopping = True


def run_child(descriptor: int, parent_pid: int) -> None:
    """The whole life of an engine process: reads what to run from `descriptor`, runs it, exits.

    Exit code 0 when the target returned, 1 when it raised. Never returns.
    """
    # The terminal's Ctrl-C and a supervisor's SIGTERM reach the whole process group; the parent alone decides,
    # by a message. A handler and not SIG_IGN, which programs started from here would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # blocked by the parent till now
    _die_with(parent_pid)
    os.set_inheritable(descriptor, False)
    channel: ChildChannel[Any, Any] = ChildChannel(socket.socket(fileno=descriptor))
    exit_code = 1
    try:
        for begin in channel.poll_commands(None):  # the parent sends no more before it has seen Ready
            begin.target(channel, begin.spec)
        exit_code = 0
    except (StartupError, EngineFaultError) as error:
        channel.fail(_one_line(str(error)))
    except BaseException as error:
        traceback.print_exc()
        # Once requests run, an exception's text may quote them.
        name = type(error).__name__
        channel.fail(name if channel.is_ready else _one_line(f"{name}: {error}"))
    finally:
        channel.close()
    sys.exit(exit_code)


def _die_with(parent_pid: int) -> None:
    """Ends this process soon after its parent, however the parent ends and whatever this process is doing.

    The end of the stream lets a healthy loop unwind and give its memory back, which a kernel-sent SIGKILL
    (PR_SET_PDEATHSIG) would not; a loop that does not unwind in time is killed from here. Unlike that signal, a
    pidfd speaks of the parent process and not of the thread that started us.
    """
    try:
        parent_fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)

    def watch() -> None:
        select.select([parent_fd], [], [])
        time.sleep(ORPHAN_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
