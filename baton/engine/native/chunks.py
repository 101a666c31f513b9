"""Prefill steps on a CPU by the project's own kernels: attention over the paged pool in place, and linear layers."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

import torch

from baton.core.errors import StartupError
from baton.engine.int8_weight import Int8Weight
from baton.engine.native.library import TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engine.batch import BatchPlan
    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig
    from baton.engine.weights import Linear


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


class _Product(Structure):
    """Mirrors `struct product` of products.h."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("type", "out", "in_")),
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        ("rows", c_int64),
        ("x", c_void_p),
        *((name, c_int64) for name in ("x_stride", "input")),
        ("norm", c_void_p),
        ("epsilon", c_double),
        ("y", c_void_p),
    ]


# What a product does to its input first.
_PLAIN, _NORMED, _GATED = 0, 1, 2


class ChunkKernels:
    """The kernels, their scratch memory and their threads, for one model.

    Keep nothing from one call to the next, so steps may be run in turn, layer by layer. Used from one thread; their
    own `num_threads - 1` helpers sleep between calls. StartupError without memory.
    """

    name = "native"

    def __init__(self, config: DecoderConfig, library: Path, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._library = ctypes.CDLL(str(library))
        create, destroy = self._library.baton_chunks_create, self._library.baton_chunks_destroy
        create.argtypes, create.restype = [c_int64, c_int64], c_void_p
        destroy.argtypes, destroy.restype = [c_void_p], None
        self._attend, self._multiply = self._library.baton_attend, self._library.baton_multiply
        self._attend.argtypes, self._attend.restype = [c_void_p, POINTER(_Attention), c_int], c_int
        self._multiply.argtypes, self._multiply.restype = [c_void_p, POINTER(_Product), c_int], c_int
        self._epsilon = config.rms_norm_eps
        self._shared = config.num_heads // config.num_kv_heads
        self._handle = create(config.head_dim, self._shared)
        if not self._handle:
            raise StartupError("no memory for the prefill kernels")
        weakref.finalize(self, destroy, self._handle)

    def use_threads(self, num_threads: int) -> None:
        """Computes with so many threads from now on."""
        self._num_threads = num_threads

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> ChunkPlan:
        """A step's attention in the layers that share one window. The step must fit (`BatchPlan.assert_fits`)."""
        return ChunkPlan(self, self._shared, plan, pool, window)

    def attend(self, attention: _Attention) -> None:
        """Blocks; releases the interpreter's lock meanwhile. MemoryError, with nothing done, without scratch."""
        if not self._attend(self._handle, ctypes.byref(attention), self._num_threads):
            raise MemoryError("scratch of the attention kernel")

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """What `linear` computes, for float32 `x`; so do the others. Blocks. MemoryError, with nothing done."""
        return self._product(linear, x, _PLAIN)

    def after_norm(self, linear: Linear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The linear layer of the RMS norm of `x` with that weight."""
        return self._product(linear, x, _NORMED, weight.to(torch.float32))

    def after_gate(self, linear: Linear, gate_up: torch.Tensor) -> torch.Tensor:
        """The linear layer of silu(gate) * up: the two halves of `gate_up` [tokens, 2 * in]."""
        return self._product(linear, gate_up, _GATED)

    def _product(
        self, linear: Linear, x: torch.Tensor, of_input: int, norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = linear.weight, None if linear.bias is None else linear.bias.to(torch.float32)
        out_features, in_features = weight.shape
        values, scales = (weight.values, weight.scales) if isinstance(weight, Int8Weight) else (weight, None)
        assert x.dtype == torch.float32, "activations are float32 where these kernels multiply"
        assert x.stride(1) == 1 == values.stride(-1), "values of a row lie side by side"
        output = torch.empty(x.shape[0], out_features)
        product = _Product(
            type=TYPES[str(values.dtype).removeprefix("torch.")],
            out=out_features,
            in_=in_features,
            weight=values.data_ptr(),
            scale=None if scales is None else scales.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            rows=x.shape[0],
            x=x.data_ptr(),
            x_stride=x.stride(0),
            input=of_input,
            norm=None if norm is None else norm.data_ptr(),
            epsilon=self._epsilon,
            y=output.data_ptr(),
        )
        if not self._multiply(self._handle, ctypes.byref(product), self._num_threads):
            raise MemoryError("scratch of a linear layer")
        return output


class ChunkPlan:
    """A step's attention in the layers that share one window; does what `AttentionPlan` does for any slices."""

    def __init__(self, kernels: ChunkKernels, shared: int, plan: BatchPlan, pool: KVPool, window: int | None) -> None:
        layout = pool.layout
        self._kernels = kernels
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
        self._kernels.attend(attention)
        return mixed.flatten(1).to(queries.dtype)
