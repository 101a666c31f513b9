"""Attention of prefill chunks on a CPU by the project's own kernel, which reads the paged pool in place."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from ctypes import POINTER, Structure, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

import torch

from baton.core.errors import StartupError
from baton.engine.native.library import TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engine.batch import BatchPlan
    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig


class _Chunk(Structure):
    """Mirrors `struct chunk` of chunks.c."""

    _fields_: ClassVar = [("table", c_void_p), ("first_row", c_int64), ("tokens", c_int64), ("start", c_int64)]


class _Attention(Structure):
    """Mirrors `struct attention` of chunks.c."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("cache_type", "kv_heads", "shared", "head_dim", "block_size", "window")),
        *((name, c_int64) for name in ("block_bytes", "half_bytes", "position_bytes")),
        ("chunk", POINTER(_Chunk)),
        ("chunks", c_int64),
        *((name, c_void_p) for name in ("keys", "queries", "mixed")),
        ("query_stride", c_int64),
    ]


class ChunkAttention:
    """The kernel, its scratch memory and its threads, for one model's heads.

    Keeps nothing from one call to the next, so plans may be run in turn, layer by layer. Used from one thread; computes
    with as many threads as PyTorch does at the moment, whose helpers sleep between calls. StartupError without memory.
    """

    def __init__(self, config: DecoderConfig, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        create, destroy = self._library.baton_chunks_create, self._library.baton_chunks_destroy
        create.argtypes, create.restype = [c_int64, c_int64], c_void_p
        destroy.argtypes, destroy.restype = [c_void_p], None
        self._attend = self._library.baton_attend
        self._attend.argtypes, self._attend.restype = [c_void_p, POINTER(_Attention), c_int], c_int
        self._shared = config.num_heads // config.num_kv_heads
        self._handle = create(config.head_dim, self._shared)
        if not self._handle:
            raise StartupError("no memory for the attention kernel")
        weakref.finalize(self, destroy, self._handle)

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> ChunkPlan:
        """A step's attention in the layers that share one window. The step must fit (`BatchPlan.assert_fits`)."""
        return ChunkPlan(self, self._shared, plan, pool, window)

    def attend(self, attention: _Attention) -> None:
        """Blocks; releases the interpreter's lock meanwhile. MemoryError, with nothing done, without scratch."""
        if not self._attend(self._handle, ctypes.byref(attention), torch.get_num_threads()):
            raise MemoryError("scratch of the attention kernel")


class ChunkPlan:
    """A step's attention in the layers that share one window; does what `AttentionPlan` does for any slices."""

    def __init__(self, kernel: ChunkAttention, shared: int, plan: BatchPlan, pool: KVPool, window: int | None) -> None:
        layout = pool.layout
        self._kernel = kernel
        self._tables = [array("i", piece.block_table) for piece in plan.slices]
        chunks = (_Chunk * len(plan.slices))()
        row = 0
        for chunk, piece, table in zip(chunks, plan.slices, self._tables, strict=True):
            chunk.table, chunk.first_row = table.buffer_info()[0], row
            chunk.tokens, chunk.start = len(piece.token_ids), piece.start_position
            row += len(piece.token_ids)
        strides = [stride * pool.tensor.itemsize for stride in pool.tensor.stride()]
        assert strides[4:] == [layout.head_dim * strides[5], pool.tensor.itemsize], "heads lie side by side"
        self._attention = _Attention(
            cache_type=TYPES[layout.dtype],
            kv_heads=layout.num_kv_heads,
            shared=shared,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            window=window or 0,
            block_bytes=strides[0],
            half_bytes=strides[2],
            position_bytes=strides[3],
            chunk=chunks,
            chunks=len(chunks),
        )
        self._layer_bytes = strides[1]

    def run(self, queries: torch.Tensor, keys_values: torch.Tensor, pool: KVPool, layer: int) -> torch.Tensor:
        """Attends in one layer; takes and returns what `AttentionPlan.run` does, and blocks until done."""
        wide = queries.to(torch.float32)
        assert wide.stride()[1:] == (wide[0, 0].numel(), wide.shape[3], 1), "heads of a row lie side by side"
        mixed = torch.empty(queries.shape, dtype=torch.float32)
        attention = self._attention
        attention.keys = pool.tensor.data_ptr() + layer * self._layer_bytes
        attention.queries, attention.query_stride = wide.data_ptr(), wide.stride(0)
        attention.mixed = mixed.data_ptr()
        self._kernel.attend(attention)
        return mixed.flatten(1).to(queries.dtype)
