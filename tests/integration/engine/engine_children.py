"""What the tests of the engine process run in it: top-level functions, as a new interpreter imports them by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

from baton.core.errors import StartupError


@dataclass(frozen=True)
class Command:
    kind: str
    value: object = None


@dataclass(frozen=True)
class Event:
    value: object


def echo(channel, spec):
    """Answers every command with an event, in one batch a poll; writes `spec` at its end when that is a path."""
    channel.ready({"spec": spec, "torch": "torch" in sys.modules, "pid": os.getpid()})
    while not channel.is_stopping:
        commands = channel.poll_commands(None)
        for command in commands:
            act(channel, command)
        channel.emit([Event(command.value) for command in commands])
    if isinstance(spec, str) and spec.startswith("/"):
        with open(spec, "w") as stream:
            stream.write("unwound")


def act(channel, command):
    match command.kind:
        case "raise":
            raise command.value
        case "exit":
            os._exit(command.value)
        case "kill":
            os.kill(os.getpid(), command.value)
        case "emit_then_kill":
            channel.emit([Event("last words")])
            os.kill(os.getpid(), signal.SIGKILL)
        case "flood":
            for number in range(command.value):
                channel.emit([Event(number)])
        case "wake":
            started = time.monotonic()
            threading.Timer(0.05, channel.wake).start()
            channel.poll_commands(60)
            channel.emit([Event(time.monotonic() - started)])
        case "poll":
            started = time.monotonic()
            assert channel.poll_commands(command.value) == []
            channel.emit([Event(time.monotonic() - started)])


def last_words(channel, spec):
    """Emits after it was told to stop."""
    channel.ready()
    while not channel.is_stopping:
        channel.poll_commands(None)
    channel.emit([Event("goodbye")])


def refuse(channel, spec):
    raise StartupError(f"{spec}: holds no\nconfig.json")


def crash_at_start(channel, spec):
    raise MemoryError("no room for\n the pool")


def die_at_start(channel, spec):
    os.kill(os.getpid(), spec)


def return_at_once(channel, spec):
    return


def never_ready(channel, spec):
    time.sleep(600)


def deaf(channel, spec):
    """Ready, and then stuck for ever."""
    channel.ready(os.getpid())
    while True:
        time.sleep(600)


def stuck_emitting(channel, spec):
    """Emits without end, whether anybody reads or not; unwinds when told to."""
    channel.ready()
    while not channel.is_stopping:
        channel.emit([Event("x" * 1000)])
        channel.poll_commands(0)
