"""Attention over the paged pool by FlashInfer, which reads the blocks of a layer where they are.

Its pages are this pool's blocks: a layer of the pool is `[pages, 2, page size, KV heads, head size]` with a stride
between pages, which is its layout "NHD". One kernel computes chunks and single tokens in one batch. Which pages a step
reads is worked out here, on the host, and tested without the library; `tests/gpu` tests the rest.
"""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig

_log = logging.getLogger(__name__)

# What the library recommends for partial results of sequences that several blocks of threads share.
WORKSPACE_BYTES = 128 << 20
# Its kernels for tensor cores on all GPUs since Ampere. Others have rules of their own for what may be recorded.
_BACKEND = "fa2"


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of each slice of a step, in order, as FlashInfer takes them: int32, in host memory.

    Slice i has the rows `row_ends[i]` up to `row_ends[i + 1]` of the queries, and the pages
    `pages[page_ends[i] : page_ends[i + 1]]`, of which the last holds `last_lengths[i]` positions.
    """

    row_ends: torch.Tensor
    page_ends: torch.Tensor
    pages: torch.Tensor
    last_lengths: torch.Tensor

    @classmethod
    def of(cls, plan: BatchPlan, block_size: int) -> PageTable:
        """That of a plan. Every slice sees its own tokens and all before them."""
        pages, counts = array("i"), []
        for piece in plan.slices:
            counts.append(-(-piece.end_position // block_size))
            pages.extend(piece.block_table[: counts[-1]])
        return cls(
            row_ends=_int32(accumulate((len(piece.token_ids) for piece in plan.slices), initial=0)),
            page_ends=_int32(accumulate(counts, initial=0)),
            pages=torch.frombuffer(pages, dtype=torch.int32),
            last_lengths=_int32((piece.end_position - 1) % block_size + 1 for piece in plan.slices),
        )


class FlashInferAttention:
    """Implements `PagedAttention` on CUDA, for one pool. `library` is the module, or what has its two classes."""

    name = "flashinfer"

    def __init__(self, library: Any, config: DecoderConfig, pool: KVPool) -> None:
        self._library = library
        self._device = pool.device
        self._max_pages = pool.layout.blocks_for(config.max_positions)
        self._windows = set(config.sliding_windows)
        # Used while a kernel runs, and kernels run one after another. Zero at first, as the library asks.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._shapes = _Shapes(config, pool, Staging(pool.device))
        self._wrappers = {
            window: library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=_BACKEND)
            for window in self._windows
        }

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> _PlannedStep:
        """See `PagedAttention.plan`."""
        table, wrapper = PageTable.of(plan, pool.layout.block_size), self._wrappers[window]
        placed, named = self._shapes.arguments(table, window)
        wrapper.plan(table.row_ends, *placed, causal=True, **named)
        return _PlannedStep(wrapper)

    def recordable(self, sizes: Sequence[int]) -> dict[int, RecordableAttention]:
        """For steps of exactly so many single tokens, by that number: what may be recorded in a CUDA graph.

        They share memory, so a plan of any of them ends the plans of the others.
        """
        most = max(sizes)
        recordable: dict[int, RecordableAttention] = {size: RecordableAttention(self._shapes) for size in sizes}
        for window in self._windows:
            ends, lengths, pages = (
                torch.zeros(count, dtype=torch.int32, device=self._device)
                for count in (most + 1, most, most * self._max_pages)
            )
            for size in sizes:
                recordable[size].wrappers[window] = self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=ends[: size + 1],
                    paged_kv_indices_buffer=pages,
                    paged_kv_last_page_len_buffer=lengths[:size],
                    backend=_BACKEND,
                )
        return recordable

    def prove(self, pool: KVPool) -> None:
        """Computes something, which compiles the kernels where that was not done before. May raise anything."""
        piece = SequenceSlice(attempt_id="proof", token_ids=[0], start_position=0, block_table=[0], sampling=None)
        shapes = self._shapes
        queries = torch.zeros(
            1, shapes.num_kv_heads, shapes.num_heads // shapes.num_kv_heads, shapes.head_dim,
            dtype=shapes.dtype, device=self._device,
        )  # fmt: skip
        for window in self._windows:
            planned = self.plan(BatchPlan(slices=[piece]), pool, window)
            planned.run(queries, queries, pool, 0)
        torch.cuda.synchronize(self._device)


class RecordableAttention:
    """Implements `PagedAttention` for steps of a fixed number of single tokens. See `FlashInferAttention.recordable`.

    What `run` computes depends on the last plan, whichever plan's it is: so it can be recorded once.
    """

    name = FlashInferAttention.name

    def __init__(self, shapes: _Shapes) -> None:
        self.wrappers: dict[int | None, Any] = {}
        self._shapes = shapes

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> _PlannedStep:
        """See `PagedAttention.plan`. Of single tokens, as many as this was made for."""
        table, wrapper = PageTable.of(plan, pool.layout.block_size), self.wrappers[window]
        placed, named = self._shapes.arguments(table, window)
        wrapper.plan(*placed, **named)
        return _PlannedStep(wrapper)


class _Shapes:
    """What of a plan's arguments is the model's."""

    def __init__(self, config: DecoderConfig, pool: KVPool, staging: Staging) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.dtype = pool.tensor.dtype
        self._block_size = pool.layout.block_size
        self._staging = staging

    def arguments(self, table: PageTable, window: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What both wrappers' `plan` takes alike, by place and by name.

        The library reads ends and lengths on the host, and the pages, which are many, on the device.
        """
        pages = self._staging.upload(table.pages)
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self._block_size)
        # It counts the positions before a token's own.
        left = -1 if window is None else window - 1
        named = {"window_left": left, "q_data_type": self.dtype, "kv_data_type": self.dtype}
        return (table.page_ends, pages, table.last_lengths, *sizes), named


class _PlannedStep:
    """Implements `StepAttention`."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def run(self, queries: torch.Tensor, keys_values: torch.Tensor, pool: KVPool, layer: int) -> torch.Tensor:
        """See `StepAttention.run`. Enqueued only."""
        mixed: torch.Tensor = self._wrapper.run(queries.flatten(1, 2), pool.tensor[:, layer])
        return mixed.flatten(1)


def open_flashinfer(config: DecoderConfig, pool: KVPool) -> FlashInferAttention | None:
    """Attention by FlashInfer over `pool`, on CUDA, where that is installed and works for this model.

    Logs which it is, and why not. Blocks; for minutes where the kernels are compiled for the first time.
    """
    try:
        if pool.tensor.dtype == torch.float32:
            raise ValueError("FlashInfer computes in 16 bits")
        import flashinfer

        attention = FlashInferAttention(flashinfer, config, pool)
        attention.prove(pool)
    except Exception as error:  # it compiles on the spot, and a missing compiler, driver or header shows as anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        _log.warning("attention on %s: PyTorch's own, because %s", pool.device, reason)
        return None
    _log.info("attention on %s: FlashInfer %s", pool.device, flashinfer.__version__)
    return attention


def _int32(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
