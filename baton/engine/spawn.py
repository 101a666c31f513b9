"""Starts child processes that run a function over a socket of their own, and says in words how they ended.

Imports no torch. What the child does first is `baton.engine.channel.run_child`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence


def spawn(
    name: str, words: Sequence[str], inherited: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a fresh interpreter; the process and our end of its socket, which does not block.

    `words` are on its command line, for whoever lists processes. It has the descriptors `inherited` under the same
    numbers. Blocks for some milliseconds. StartupError.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    command = [sys.executable, "-P", "-m", "baton.engine.child", *words, str(theirs.fileno()), str(os.getpid())]
    # It finds the modules that this process finds.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # The child inherits the mask: a Ctrl-C can't reach it before it has its own handlers.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with theirs:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *inherited), env=environment
            )
    except OSError as error:
        ours.close()
        raise StartupError(f"the {name} process cannot be started: {error.strerror}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return child, ours


def start_failure(name: str, returncode: int) -> str:
    """One line for a child that ended without a word before it was ready."""
    if returncode == -signal.SIGKILL:
        return f"the {name} process was killed while it started; the machine may be out of memory"
    if returncode < 0:
        return f"the {name} process was killed by {signal_name(-returncode)} while it started"
    return f"the {name} process ended with exit code {returncode} before it was ready"


def how_it_ended(returncode: int) -> str:
    """What follows \"the process\" in a sentence."""
    if returncode < 0:
        return f"was killed by {signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


def signal_name(number: int) -> str:
    """SIGKILL and the like."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
