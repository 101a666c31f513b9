"""Deadlines do not propagate by themselves: each hop gets what is left, less a margin to answer in."""

from __future__ import annotations

from typing import Protocol

from baton.core.errors import DeadlineExceededError


class HasDeadline(Protocol):
    """A server's context, or a call."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        ...


def remaining_s(context: HasDeadline, margin_s: float = 0.05) -> float | None:
    """Timeout of the next hop, in seconds; None when the caller set no deadline.

    The margin is what this process keeps to report the next hop's failure itself, with its details, before the
    caller's own deadline fires. DeadlineExceededError when nothing is left.
    """
    left_s = context.time_remaining()
    if left_s is None:
        return None
    if left_s <= margin_s:
        raise DeadlineExceededError(f"{max(left_s, 0.0):.3f} s are left until the deadline, too few to go on")
    return left_s - margin_s
