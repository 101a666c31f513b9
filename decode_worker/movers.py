"""Where KV blocks are, and who copies them into, out of and back to the pool while the engine goes on. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core.errors import ServingError
    from baton.engine.block_pool import BlockPool
    from decode_worker.sequence import Swap
    from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool
    from kv_transfer.transport import ReadResult


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDone:
    """A copy that ended, by itself or by an error: nothing writes to its blocks any more."""

    attempt_id: str
    result: ReadResult | ServingError


class Copier(Protocol):
    """Copies handed-over blocks while the caller goes on. No call blocks for longer than a piece of a copy."""

    def open_peer(self, pool: PeerPool) -> None:
        """Makes a source's pool readable. A failure shows in the copies from it."""
        ...

    def forget_peer(self, peer: PeerKey) -> None:
        """Gives up all that is held of a source; copies from it end with an error."""
        ...

    def start(self, attempt_id: str, kv: KVDescriptor, block_ids: Sequence[int]) -> None:
        """Begins to fill `block_ids`; `take_done` tells the end, whatever it is."""
        ...

    @property
    def has_done(self) -> bool:
        """Whether `take_done` would return something."""
        ...

    def take_done(self) -> list[CopyDone]:
        """The copies that ended since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapDone:
    """A swap that ended: nothing reads or writes its blocks and slots any more."""

    attempt_id: str
    succeeded: bool


class Swapper(Protocol):
    """Copies blocks to the swap space and back while the caller goes on. No call blocks."""

    def start(self, swap: Swap) -> None:
        """Begins to copy; `take_done` tells the end, whatever it is."""
        ...

    @property
    def has_done(self) -> bool:
        """Whether `take_done` would return something."""
        ...

    def take_done(self) -> list[SwapDone]:
        """The swaps that ended since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """Where KV blocks are: in the pool, and in the swap space if there is one, which `swapper` copies to and from.

    `copy_blocks` copies blocks of the pool to others of it before the steps that begin afterwards.
    """

    pool: BlockPool
    copy_blocks: Callable[[Sequence[int], Sequence[int]], None]
    swap: BlockPool | None = None
    swapper: Swapper | None = None
