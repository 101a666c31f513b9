"""How a model is divided among the ranks of a tensor-parallel group. Imports no torch.

Attention is divided by KV heads, each with the query heads that read it; the MLP by its inner features; embeddings and
head by the vocabulary. Norms, and the biases of sums, are small and not divided.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.quantization import GROUP


@dataclass(frozen=True, slots=True)
class Cut:
    """`count` of `total` rows or columns of a matrix, from `first` on."""

    total: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What rank `rank` of `size` has. Parts differ by one unit where the ranks do not divide a number."""

    rank: int
    size: int

    def cut(self, units: int, width: int = 1) -> Cut:
        """This rank's part of `units` that are each `width` rows or columns wide and must stay together."""
        first, end = units * self.rank // self.size, units * (self.rank + 1) // self.size
        return Cut(units * width, first * width, (end - first) * width)

    def cut_features(self, total: int) -> Cut:
        """This rank's part of `total` features, in whole groups of quantization if they are made of such."""
        return self.cut(total // GROUP, GROUP) if total % GROUP == 0 and total >= GROUP * self.size else self.cut(total)

    def cuts(self, units: int) -> list[Cut]:
        """The parts of all ranks, in their order."""
        return [Shard(rank, self.size).cut(units) for rank in range(self.size)]


WHOLE = Shard(0, 1)


def whole(total: int) -> Cut:
    """All of it."""
    return Cut(total, 0, total)
