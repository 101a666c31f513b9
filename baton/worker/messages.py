"""What the server process and the engine process of either worker tell each other: plain data, pickled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from baton.core.errors import ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """The attempt is not wanted any more. Harmless when it has ended; always answered by its last event."""

    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Last event of an attempt that did not run to its end: its blocks are free, and nothing writes to them."""

    is_last: ClassVar[bool] = True
    attempt_id: str
    error: ServingError
