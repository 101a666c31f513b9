"""Stop strings: end the text before the first of them, and never let a part of one out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStringMatcher:
    """Watches one text as it grows, whatever the pieces it comes in.

    The stop string that is complete first ends the text; of two that are complete with the same character, the
    one that began first. So the result does not depend on how the text was cut. What is held back is the
    longest end of the text that may still become a stop string, and nothing more.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._first_characters = frozenset(string[0] for string in strings)
        self._longest = max(map(len, strings), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string appeared; nothing may be pushed after it."""
        return self._is_stopped

    def push(self, text: str) -> str:
        """Adds `text` and returns what is certain to belong to the output. Sets `is_stopped` on a match."""
        assert not self._is_stopped, "the text has ended"
        if not self._strings:
            return text
        text = self._held + text
        start = self._match_start(text)
        if start is not None:
            self._is_stopped = True
            self._held = ""
            return text[:start]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The text is over: returns what was held back, for it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _match_start(self, text: str) -> int | None:
        matches = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        return min(matches)[1] if matches else None

    def _hold_from(self, text: str) -> int:
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._first_characters:
                tail = text[at:]
                if any(string.startswith(tail) for string in self._strings):
                    return at
        return len(text)
