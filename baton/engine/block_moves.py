"""The seam between whoever decides where KV blocks go and the pool, or the pools of several ranks, that have them.

Imports no torch: `baton.engine.host_copy` has what moves the blocks of one pool.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Way(Enum):
    """From where to where."""

    OUT = "out"
    """From the pool to the host copy."""
    BACK = "back"
    """From the host copy to the pool."""
    WITHIN = "within"
    """From blocks of the pool to others of it; none is on both sides."""


class BlockMover(Protocol):
    """Copies blocks between a pool and its host copy, or within the pool. Used from the engine's thread."""

    def move(self, way: Way, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copies blocks one for one. Blocks.

        What comes back, and what is copied within, is there for the steps that begin afterwards; what goes out is there
        when this returns, as the steps before have left it. Raises OutOfMemoryError when the copy does not fit into
        memory, and EngineFaultError as `Executor.check` does; the targets hold garbage then.
        """
        ...
