"""What the ranks of a tensor-parallel group say to each other within a step: sums and joins of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from baton.engine.sharding import Shard


class GroupBrokenError(Exception):
    """The ranks are not in step any more: one of them has failed, is gone or hangs."""


class RankGroup(Protocol):
    """One rank's end of a group. Used from one thread.

    Every call but `leave` is collective: all ranks make the same calls in the same order, and one returns when all have
    come to it. It raises GroupBrokenError when a rank has left or is long behind; all must then `leave` and `join`
    anew before anything else.
    """

    @property
    def shard(self) -> Shard:
        """Which rank this is."""
        ...

    def join(self, epoch: int) -> None:
        """Connects the ranks. `epoch` is above 0, the same for all of them, and larger each time."""
        ...

    def leave(self) -> None:
        """Ends whatever the other ranks wait for. Repeating it is harmless."""
        ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous `x` of all ranks added up, the same to the bit on each, in the place of `x`."""
        ...

    def side_by_side(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """The ranks' parts [rows, this rank's cut of total], one after another: [rows, total]."""
        ...
