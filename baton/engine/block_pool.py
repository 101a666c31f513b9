"""Which KV blocks are free, and who owns the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutOfBlocksError(ResourceExhaustedError):
    """The pool has fewer free blocks than asked for. Nothing was allocated."""

    default_reason = "OUT_OF_BLOCKS"

    def __init__(self, num_wanted: int, num_free: int) -> None:
        super().__init__(
            f"{num_wanted} KV blocks are needed and {num_free} are free",
            retry_after_s=1.0,
            metadata={"wanted": str(num_wanted), "free": str(num_free)},
        )
        self.num_wanted = num_wanted
        self.num_free = num_free


class BlockPool:
    """Counts block ids 0..num_blocks-1 of `block_size` tokens each; holds no memory.

    Invariant: every id is either free or has exactly one owner. An owner is one attempt of a request, named by
    its attempt id, so a late signal of an old attempt can never free blocks of a new one. The last freed block
    is the first to be given again, while it is warm in the cache.

    No call blocks. For use by one thread.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owner_of: dict[int, str] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return len(self._owner_of)

    def allocate(self, owner: str, num_blocks: int) -> list[int]:
        """Gives `num_blocks` free blocks to `owner`, who has them until `free`; an owner may allocate again.

        Raises OutOfBlocksError, and gives none, when fewer are free.
        """
        assert num_blocks >= 0, num_blocks
        if num_blocks > len(self._free):
            raise OutOfBlocksError(num_blocks, len(self._free))
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._owner_of.update(dict.fromkeys(block_ids, owner))
        return block_ids

    def free(self, owner: str, block_ids: Sequence[int]) -> None:
        """Takes `block_ids` back from `owner`. A block that is not his is a bug: AssertionError, nothing freed."""
        assert len(set(block_ids)) == len(block_ids), f"{owner} frees a block twice: {list(block_ids)}"
        for block_id in block_ids:
            holder = self._owner_of.get(block_id)
            assert holder == owner, f"{owner} frees block {block_id}, which belongs to {holder}"
        for block_id in block_ids:
            del self._owner_of[block_id]
        self._free.extend(reversed(block_ids))

    def owned_by(self, owner: str) -> frozenset[int]:
        """The blocks that `owner` has now. Looks at every used block: for checks and clean-up, not for each step."""
        return frozenset(block_id for block_id, holder in self._owner_of.items() if holder == owner)

    def check_integrity(self) -> None:
        """AssertionError unless every block is free or owned, and none is both or twice free."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._owner_of.keys(), f"both free and owned: {sorted(free & self._owner_of.keys())}"
        assert free | self._owner_of.keys() == set(range(self.num_blocks)), "a block is lost"
