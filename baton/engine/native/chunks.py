"""Prefill steps on a CPU by the project's own kernels: linear layers, and attention over the paged pool in place."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

import torch

from baton.core.errors import StartupError
from baton.engine.heads import split_heads
from baton.engine.int8_weight import Int8Weight
from baton.engine.native.library import TYPES

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engine.batch import BatchPlan
    from baton.engine.heads import Rotary
    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig
    from baton.engine.step_inputs import StepInputs
    from baton.engine.weights import LayerWeights, Linear


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
        ("adds", c_int64),
    ]


class _Rows(Structure):
    """Mirrors `struct rows` of chunks.c."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("cache_type", "rows", "query_heads", "kv_heads", "head_dim")),
        *((name, c_void_p) for name in ("heads", "cosine", "sine", "query_norm", "key_norm")),
        ("epsilon", c_double),
        *((name, c_void_p) for name in ("keys", "position")),
        ("position_bytes", c_int64),
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
        self._place = self._library.baton_place_rows
        self._place.argtypes, self._place.restype = [c_void_p, POINTER(_Rows), c_int], c_int
        self._config = config
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

    def plan_heads(self, rotary: Rotary, inputs: StepInputs, pool: KVPool) -> ChunkHeads:
        """What is done to the heads of a step; `rotary` is of its tokens, in float32."""
        return ChunkHeads(self, self._config, rotary, inputs, pool)

    def place(self, rows: _Rows) -> None:
        """Blocks; releases the interpreter's lock meanwhile. MemoryError, with nothing done, without scratch."""
        if not self._place(self._handle, ctypes.byref(rows), self._num_threads):
            raise MemoryError("scratch of the prefill kernels")

    def attend(self, attention: _Attention) -> None:
        """Blocks; releases the interpreter's lock meanwhile. MemoryError, with nothing done, without scratch."""
        if not self._attend(self._handle, ctypes.byref(attention), self._num_threads):
            raise MemoryError("scratch of the attention kernel")

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """What `linear` computes, for float32 `x`; so do the others. Blocks. MemoryError, with nothing done."""
        return self._product(linear, self._of(x, _PLAIN))

    def after_norm(self, linear: Linear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The linear layer of the RMS norm of `x` with that weight."""
        wide = weight.to(torch.float32)
        return self._product(linear, self._of(x, _NORMED, norm=wide.data_ptr()))

    def after_gate(self, linear: Linear, gate_up: torch.Tensor) -> torch.Tensor:
        """The linear layer of silu(gate) * up: the two halves of `gate_up` [tokens, 2 * in]."""
        return self._product(linear, self._of(gate_up, _GATED))

    def add_linear(self, to: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        """Adds what `linear` gives to `to` [tokens, out]."""
        self._product(linear, self._of(x, _PLAIN), to)

    def add_after_gate(self, to: torch.Tensor, linear: Linear, gate_up: torch.Tensor) -> None:
        """Adds what `after_gate` gives to `to` [tokens, out]."""
        self._product(linear, self._of(gate_up, _GATED), to)

    def _of(self, x: torch.Tensor, what: int, norm: int | None = None) -> _Product:
        """A product of `x`, which `what` is done to first."""
        assert x.dtype == torch.float32, "activations are float32 where these kernels multiply"
        assert x.stride(1) == 1, "values of a row lie side by side"
        return _Product(
            rows=x.shape[0], x=x.data_ptr(), x_stride=x.stride(0), input=what, norm=norm, epsilon=self._epsilon
        )

    def _product(self, linear: Linear, product: _Product, to: torch.Tensor | None = None) -> torch.Tensor:
        """Adds the product's results to `to`, if there is one; returns what has them."""
        weight, bias = linear.weight, None if linear.bias is None else linear.bias.to(torch.float32)
        out_features, in_features = weight.shape
        values, scales = (weight.values, weight.scales) if isinstance(weight, Int8Weight) else (weight, None)
        assert values.stride(-1) == 1, "weights of a row lie side by side"
        output = torch.empty(product.rows, out_features) if to is None else to
        assert output.is_contiguous() and output.dtype == torch.float32, "results are float32 without gaps"  # noqa: PT018
        product.type, product.out, product.in_ = TYPES[_name(values.dtype)], out_features, in_features
        product.weight, product.scale = values.data_ptr(), None if scales is None else scales.data_ptr()
        product.bias = None if bias is None else bias.data_ptr()
        product.y, product.adds = output.data_ptr(), to is not None
        if not self._multiply(self._handle, ctypes.byref(product), self._num_threads):
            raise MemoryError("scratch of a linear layer")
        return output


class ChunkHeads:
    """Does what `TorchHeads` does, for float32 heads."""

    def __init__(
        self, kernels: ChunkKernels, config: DecoderConfig, rotary: Rotary, inputs: StepInputs, pool: KVPool
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._pool = pool
        # The library reads these: they have to live as long as this object.
        self._cos, self._sin = (each.contiguous() for each in rotary)
        self._positions = inputs.pool_rows.contiguous()
        assert self._cos.dtype == self._sin.dtype == torch.float32, "angles are float32"
        strides = pool.tensor.stride()
        assert strides[4:] == (config.head_dim, 1), "heads lie side by side"
        self._rows = _Rows(
            cache_type=TYPES[pool.layout.dtype],
            query_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cosine=self._cos.data_ptr(),
            sine=self._sin.data_ptr(),
            epsilon=config.rms_norm_eps,
            position=self._positions.data_ptr(),
            position_bytes=strides[3] * pool.tensor.itemsize,
        )
        self._layer_bytes = strides[1] * pool.tensor.itemsize

    def run(self, heads: torch.Tensor, layer: LayerWeights, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepHeads.run`; blocks until done. Keys and values that it returns are not rounded as the pool's are."""
        assert heads.is_contiguous(), "rows follow each other"
        assert heads.dtype == torch.float32, "heads are float32"
        query_norm, key_norm = (
            None if norm is None else norm.to(torch.float32) for norm in (layer.query_norm, layer.key_norm)
        )
        rows = self._rows
        rows.rows, rows.heads = heads.shape[0], heads.data_ptr()
        rows.query_norm = None if query_norm is None else query_norm.data_ptr()
        rows.key_norm = None if key_norm is None else key_norm.data_ptr()
        rows.keys = self._pool.tensor.data_ptr() + index * self._layer_bytes
        self._kernels.place(rows)
        return split_heads(self._config, heads.view(heads.shape[0], -1, self._config.head_dim))


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
