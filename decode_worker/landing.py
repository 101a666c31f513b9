"""Handovers and swaps of a worker whose pools are filled from a host copy: by several ranks, between their steps.

All ranks must move the same blocks, in one order with the steps, so it is done on the engine's thread: a move holds the
steps up. No torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from baton.core.errors import EngineFaultError, InternalError, ServingError
from baton.engine.block_moves import Way
from decode_worker.movers import CopyDone, SwapDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.block_moves import BlockMover
    from decode_worker.movers import Copier
    from decode_worker.sequence import Swap
    from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool

_log = logging.getLogger(__name__)


class LandingCopier:
    """A `Copier` over one that copies to the host copy: what that has brought goes on to the pool, under the same ids.

    A part is told as done when both copies were made, so a growing cache goes on to the pool part by part.
    """

    def __init__(self, copier: Copier, blocks: BlockMover) -> None:
        self._copier = copier
        self._blocks = blocks
        self._under_way: dict[str, Sequence[int]] = {}

    def open_peer(self, pool: PeerPool) -> None:
        """See `Copier.open_peer`."""
        self._copier.open_peer(pool)

    def forget_peer(self, peer: PeerKey) -> None:
        """See `Copier.forget_peer`."""
        self._copier.forget_peer(peer)

    def start(self, attempt_id: str, kv: KVDescriptor, block_ids: Sequence[int]) -> None:
        """See `Copier.start`. One copy of an attempt is under way at a time."""
        self._under_way[attempt_id] = block_ids
        self._copier.start(attempt_id, kv, block_ids)

    @property
    def has_done(self) -> bool:
        """See `Copier.has_done`."""
        return self._copier.has_done

    def take_done(self) -> list[CopyDone]:
        """See `Copier.take_done`. Blocks for the second copy; EngineFaultError when a rank is gone."""
        return [self._land(done) for done in self._copier.take_done()]

    def _land(self, done: CopyDone) -> CopyDone:
        block_ids = self._under_way.pop(done.attempt_id)
        if isinstance(done.result, ServingError):
            return done
        error = _move(self._blocks, Way.BACK, block_ids, block_ids)
        return done if error is None else CopyDone(attempt_id=done.attempt_id, result=error)


class MoverSwapper:
    """A `Swapper` whose slots are blocks of the host copy, from number `first_slot` on. Each swap is over at once."""

    def __init__(self, blocks: BlockMover, first_slot: int) -> None:
        self._blocks = blocks
        self._first_slot = first_slot
        self._done: list[SwapDone] = []

    def start(self, swap: Swap) -> None:
        """Copies. Blocks; EngineFaultError when a rank is gone."""
        slots = [self._first_slot + slot for slot in swap.slots]
        if swap.is_out:
            error = _move(self._blocks, Way.OUT, swap.block_ids, slots)
        else:
            error = _move(self._blocks, Way.BACK, slots, swap.block_ids)
        self._done.append(SwapDone(attempt_id=swap.attempt_id, succeeded=error is None))

    @property
    def has_done(self) -> bool:
        """Whether `take_done` would return something."""
        return bool(self._done)

    def take_done(self) -> list[SwapDone]:
        """The swaps since the last call."""
        done, self._done = self._done, []
        return done


def _move(blocks: BlockMover, way: Way, source_ids: Sequence[int], target_ids: Sequence[int]) -> ServingError | None:
    """What it failed by; an end of the engine is raised."""
    try:
        blocks.move(way, source_ids, target_ids)
    except EngineFaultError:
        raise
    except ServingError as error:
        _log.warning("a copy of KV blocks failed: %s", error)
        return error
    except Exception:
        _log.exception("a copy of KV blocks failed")
        return InternalError("the copy of KV blocks failed")
    return None
