"""Which KV blocks are free, who owns the others, and which contents are known."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from baton.core.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


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

    A block is owned by any number of attempts of requests, each named by its attempt id, so a late signal of an old
    attempt can never free blocks of a new one. It is free when nobody owns it.

    A block whose contents are complete can be published under a name for them. From then on it is never written again,
    others can share it, and once nobody owns it, it stays as it is until the memory is needed: blocks without a name
    are given first, the last freed one before others, while it is warm in the processor's cache; then published ones,
    the one first whose last owner left first. Of the blocks of one `free` the last goes first. So where they are
    published and freed as chains, of which each part is owned only together with all before it, a block never goes
    before those that build on it.

    No call blocks. For use by one thread.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0, num_blocks
        assert block_size > 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._held: dict[str, set[int]] = {}
        self._num_owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # Published blocks that nobody owns, the next to be given first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - self.num_free

    def allocate(self, owner: str, num_blocks: int) -> list[int]:
        """Gives `num_blocks` free blocks to `owner` alone, who has them until `free`; an owner may allocate again.

        Raises OutOfBlocksError, and gives none, when fewer are free. What free blocks were published as is forgotten.
        """
        assert num_blocks >= 0, num_blocks
        if num_blocks > self.num_free:
            raise OutOfBlocksError(num_blocks, self.num_free)
        block_ids = [self._blank.pop() if self._blank else self._evict() for _ in range(num_blocks)]
        self._own(owner, block_ids)
        return block_ids

    def free(self, owner: str, block_ids: Sequence[int]) -> None:
        """Ends `owner`'s hold of `block_ids`. A block that is not his is a bug: AssertionError, nothing freed."""
        assert len(set(block_ids)) == len(block_ids), f"{owner} frees a block twice: {list(block_ids)}"
        held = self._held.get(owner, set())
        for block_id in block_ids:
            assert block_id in held, f"{owner} frees block {block_id}, which belongs to {self._owners(block_id)}"
        held.difference_update(block_ids)
        if not held:
            self._held.pop(owner, None)
        for block_id in reversed(block_ids):
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] == 0:
                if block_id in self._name_of:
                    self._idle[block_id] = None
                else:
                    self._blank.append(block_id)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The published blocks of `names`, in order, up to the first that there is none of."""
        found = []
        for name in names:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_free_beside(self, block_ids: Iterable[int]) -> int:
        """Blocks that `allocate` could give once `block_ids` are shared."""
        return self.num_free - sum(1 for block_id in block_ids if self._num_owners[block_id] == 0)

    def share(self, owner: str, block_ids: Sequence[int]) -> None:
        """Makes `owner` one more owner of published blocks. Read-only: nobody may write into them."""
        for block_id in block_ids:
            assert block_id in self._name_of, f"block {block_id} is not published"
            self._idle.pop(block_id, None)
        self._own(owner, block_ids)

    def publish(self, owner: str, block_id: int, name: bytes) -> int:
        """Lets others find the contents of `owner`'s block, which are complete, by `name`.

        Returns the block to use from now on: another one if those contents are known already. Then `owner` shares that
        one, and his own is free.
        """
        assert block_id in self._held.get(owner, ()), f"{owner} publishes block {block_id}, which is not his"
        known = self._block_of.get(name)
        if known is None:
            assert block_id not in self._name_of, f"block {block_id} is published under another name"
            self._block_of[name] = block_id
            self._name_of[block_id] = name
            return block_id
        if known != block_id:
            self.share(owner, (known,))
            self.free(owner, (block_id,))
        return known

    def assert_private(self, owner: str, block_ids: Iterable[int]) -> None:
        """AssertionError unless `owner` may write into all of `block_ids`: they are his alone and not published."""
        held = self._held.get(owner, ())
        for block_id in block_ids:
            assert block_id in held, f"{owner} writes into block {block_id}, which is not his"
            assert self._num_owners[block_id] == 1, f"{owner} writes into block {block_id}, which others share"
            assert block_id not in self._name_of, f"{owner} writes into block {block_id}, which is published"

    def owned_by(self, owner: str) -> frozenset[int]:
        """The blocks that `owner` has now."""
        return frozenset(self._held.get(owner, ()))

    def check_integrity(self) -> None:
        """AssertionError unless every block is free or owned as often as is counted, and none is both or twice free."""
        free = [*self._blank, *self._idle]
        assert len(set(free)) == len(free), "a block is free twice"
        owned = [block_id for held in self._held.values() for block_id in held]
        assert not set(free) & set(owned), f"both free and owned: {sorted(set(free) & set(owned))}"
        assert set(free) | set(owned) == set(range(self.num_blocks)), "a block is lost"
        counts = [0] * self.num_blocks
        for block_id in owned:
            counts[block_id] += 1
        assert counts == self._num_owners, "the owners of a block are miscounted"
        assert {name: block_id for block_id, name in self._name_of.items()} == self._block_of, "a name is lost"
        assert self._idle.keys() <= self._name_of.keys(), "a block without a name is kept"
        assert not self._name_of.keys() & set(self._blank), "a blank block has a name"

    def _own(self, owner: str, block_ids: Sequence[int]) -> None:
        if not block_ids:
            return
        held = self._held.setdefault(owner, set())
        assert held.isdisjoint(block_ids), f"{owner} would own a block twice"
        held.update(block_ids)
        for block_id in block_ids:
            self._num_owners[block_id] += 1

    def _evict(self) -> int:
        block_id, _ = self._idle.popitem(last=False)
        del self._block_of[self._name_of.pop(block_id)]
        return block_id

    def _owners(self, block_id: int) -> str:
        return ", ".join(sorted(owner for owner, held in self._held.items() if block_id in held)) or "nobody"
