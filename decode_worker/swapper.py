"""Moves KV blocks to the swap space and back on a thread of its own, so that running sequences keep stepping."""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from decode_worker.movers import SwapDone

if TYPE_CHECKING:
    from collections.abc import Callable

    from decode_worker.sequence import Swap
    from kv_transfer.swap import SwapSpace

_log = logging.getLogger(__name__)


class ThreadSwapper:
    """A `Swapper`. Not the handovers' thread: those wait for networks, and here somebody waits for blocks.

    Used by the engine's thread; `wake` is called from the helper thread when a swap has ended.
    """

    def __init__(self, space: SwapSpace, wake: Callable[[], None]) -> None:
        self._space = space
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swap")
        self._done: deque[SwapDone] = deque()

    def start(self, swap: Swap) -> None:
        """Begins to copy; nobody else may write to the blocks and slots until it is done."""
        self._thread.submit(self._run, swap)

    @property
    def has_done(self) -> bool:
        """Whether `take_done` would return something."""
        return bool(self._done)

    def take_done(self) -> list[SwapDone]:
        """The swaps that ended since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Waits for the copy that runs and drops those that don't yet."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, swap: Swap) -> None:
        succeeded = False
        try:
            if swap.is_out:
                self._space.save(swap.block_ids, swap.slots)
            else:
                self._space.restore(swap.slots, swap.block_ids)
            succeeded = True
        except Exception:
            _log.exception("a swap failed")
        self._done.append(SwapDone(attempt_id=swap.attempt_id, succeeded=succeeded))
        self._wake()
