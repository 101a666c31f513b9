"""Host memory that KV blocks are moved to when the pool is full, and back."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from baton.core.errors import StartupError
from baton.engine.block_runs import copy_runs
from baton.engine.host_memory import allocate
from kv_transfer.destination import copy_on_cpu, flat_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.kv_pool import KVPool
    from kv_transfer.destination import Move


class SwapSpace:
    """`num_slots` places for blocks of `pool`. Who has which is the caller's to know.

    Next to a pool in host memory the space takes real memory with its first use only; next to one on a device it is
    pinned, and taken at once. StartupError when it is not to be had. In host memory blocks are copied by `move`.
    """

    def __init__(self, pool: KVPool, num_slots: int, move: Move = ctypes.memmove) -> None:
        self._move = move
        self._blocks = flat_blocks(pool.tensor)
        shape = (num_slots, pool.layout.block_bytes)
        num_bytes = num_slots * pool.layout.block_bytes
        self._stream: torch.cuda.Stream | None = None
        try:
            if pool.device.type == "cpu":
                self._slots = allocate(num_bytes).view(shape)
            else:
                self._slots = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        except (MemoryError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise StartupError(f"swap_bytes: cannot allocate {num_bytes} bytes of host memory: {reason}") from error

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copies blocks to slots. Blocks, the interpreter's lock released; nobody may write to either."""
        self._copy(self._blocks, block_ids, self._slots, slots)

    def restore(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies slots to blocks, as `save` does the reverse. Steps that begin afterwards see them."""
        self._copy(self._slots, slots, self._blocks, block_ids)

    def _copy(
        self, source: torch.Tensor, source_ids: Sequence[int], destination: torch.Tensor, ids: Sequence[int]
    ) -> None:
        runs = copy_runs(source_ids, ids)
        if self._stream is None:
            copy_on_cpu(source, destination, runs, self._move)
            return
        # Beside the steps, which have their own stream; a step has ended when its tokens are known.
        with torch.cuda.stream(self._stream):
            for run in runs:
                destination[run.destination : run.destination + run.length].copy_(
                    source[run.source : run.source + run.length], non_blocking=True
                )
        self._stream.synchronize()
