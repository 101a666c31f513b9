"""Starts child processes that end when their parent ends: `launch.py PARENT_PID SIGNAL COMMAND...`.

Run as a script it needs no other module: it is started by path, without site-packages, and replaces itself with the
command within a few milliseconds. Doing this between fork and exec in the parent would run Python code, and gRPC's fork
handlers, while the parent's other threads hold their locks: children crashed.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Sequence

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Sets one attribute of this process; OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def bound_to_this_process(command: Sequence[str], number: signal.Signals) -> list[str]:
    """`command`, whose first word is a path, such that it gets the signal when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def main(argv: list[str]) -> int:
    """Returns an exit code only when the command cannot be started."""
    parent, number, command = int(argv[1]), int(argv[2]), argv[3:]
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the line above
        return 1
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
