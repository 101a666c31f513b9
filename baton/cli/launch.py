"""Runs a command that ends when its parent ends: `launch.py PARENT_PID COMMAND...`.

A file of its own that needs no other module of Baton: it is started by path, without site-packages, and replaces
itself with the command within a few milliseconds. Doing this between fork and exec in the parent would run Python
code while the parent's other threads hold their locks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Sets one attribute of this process; OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def main(argv: list[str]) -> int:
    """Returns an exit code only when the command cannot be started."""
    parent, command = int(argv[1]), argv[2:]
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        return 1
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv))
