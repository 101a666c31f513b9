"""When a dead child is started again."""

from __future__ import annotations


class RestartPolicy:
    """Doubling delays between quick deaths, and an end after too many of them in a row."""

    def __init__(self, *, quick_s: float = 30.0, max_quick_deaths: int = 5, first_delay_s: float = 0.5) -> None:
        self._quick_s = quick_s
        self._max_quick_deaths = max_quick_deaths
        self._first_delay_s = first_delay_s
        self._quick_deaths = 0

    def delay_s_after(self, life_s: float) -> float | None:
        """Seconds until the next start after a life of `life_s` seconds; None: give up."""
        self._quick_deaths = self._quick_deaths + 1 if life_s < self._quick_s else 1
        if self._quick_deaths >= self._max_quick_deaths:
            return None
        return self._first_delay_s * 2.0 ** (self._quick_deaths - 1)
