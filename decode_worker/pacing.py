"""Keeps sequences from running ahead of their readers: a slow client stops its own sequence and no other.

HTTP/2's windows end at the reader: when a client reads no more, its gateway stops reading this worker's stream, and
writes to it wait. What the engine goes on to produce gathers here, so here it is counted.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from decode_worker.messages import Park, Resume, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.worker.engine_loop import EventBatch


class Pacer:
    """Counts each followed attempt's tokens that nobody has read, and parks it while there are too many.

    An attempt with more than `max_unread_tokens` is parked, and resumed when half of them are read. The tokens of
    steps that run when it is parked still come.
    """

    def __init__(self, control: Callable[[Any], None], *, max_unread_tokens: int) -> None:
        """`control` sends a command to the engine; it does not block."""
        self._control = control
        self._max_unread = max_unread_tokens
        self._unread: dict[str, int] = {}
        self._parked: set[str] = set()

    @contextmanager
    def follow(self, attempt_id: str) -> Iterator[Callable[[int], None]]:
        """Counts the attempt's tokens for the block; gives the function that takes so many as read."""
        self._unread[attempt_id] = 0
        try:
            yield lambda num_tokens: self._read(attempt_id, num_tokens)
        finally:
            del self._unread[attempt_id]
            self._parked.discard(attempt_id)

    def observe(self, batch: EventBatch) -> None:
        """Takes an engine's batch in, before readers see it."""
        for event in batch.events:
            if not isinstance(event, Token) or event.attempt_id not in self._unread:
                continue
            self._unread[event.attempt_id] += 1
            if self._unread[event.attempt_id] > self._max_unread and event.attempt_id not in self._parked:
                self._parked.add(event.attempt_id)
                self._control(Park(attempt_id=event.attempt_id))

    def _read(self, attempt_id: str, num_tokens: int) -> None:
        self._unread[attempt_id] -= num_tokens
        if attempt_id in self._parked and self._unread[attempt_id] <= self._max_unread // 2:
            self._parked.discard(attempt_id)
            self._control(Resume(attempt_id=attempt_id))
