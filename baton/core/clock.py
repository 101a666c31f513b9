"""Time as a dependency.

Durations only: a monotonic reading never leaves its process, because two processes' readings cannot be
compared.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where components read the time."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to: the fake for tests and the simulation's clock."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward by `seconds`; ValueError when negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now_s += seconds
