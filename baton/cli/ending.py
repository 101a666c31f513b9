"""How the commands end."""

from __future__ import annotations

import os
import sys

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def discard_output() -> None:
    """What is left in the buffer of the standard output, which cannot be written, goes nowhere when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
