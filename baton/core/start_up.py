"""What a process tells of its own start."""

from __future__ import annotations

import logging
import time

# A logger of its own, so that a supervisor can have these lines shown and no others.
LOGGER_NAME = "baton.start_up"
# How each of the lines begins.
LINE_PREFIX = "start-up: "


class StartPhases:
    """Logs which phase of a start begins, and how long the one before took. One at a time."""

    def __init__(self) -> None:
        self._log = logging.getLogger(LOGGER_NAME)
        self._current = ""
        self._since_s = 0.0

    def begin(self, name: str) -> None:
        """The phase `name` begins; the one before is done."""
        now_s = time.monotonic()
        if self._current:
            took_s = round(now_s - self._since_s, 3)
            extra = {"phase": self._current, "duration_s": took_s}
            self._log.info("%s%s (%s took %.1f s)", LINE_PREFIX, name, self._current, took_s, extra=extra)
        else:
            self._log.info("%s%s", LINE_PREFIX, name)
        self._current, self._since_s = name, now_s

    def end(self) -> None:
        """The last phase is done."""
        self.begin("done")
