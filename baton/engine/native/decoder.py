"""Decode steps on a CPU by the project's own kernels: one call a step, for rows of one token each."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from typing import TYPE_CHECKING

import torch

from baton.core.errors import StartupError
from baton.engine.int8_weight import Int8Weight
from baton.engine.native.library import NO_MEMORY, OK, TYPES, Batch, Layer, Linear, Model, open_library

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engine import weights as torch_weights
    from baton.engine.batch import BatchPlan
    from baton.engine.kv_pool import KVPool
    from baton.engine.model import DecoderModel
    from baton.engine.model_config import DecoderConfig


class NativeDecoder:
    """Computes what `DecoderModel.forward` does, for plans whose slices have one token each.

    Uses the same weights and pool in place, whatever their types; activations are float32 in any case. A row's
    result is the same, to the bit, in any batch and with any number of threads. Used from one thread; its own
    `num_threads - 1` helpers sleep between steps and end with it. StartupError where its memory is not there.
    """

    def __init__(self, model: DecoderModel, pool: KVPool, *, library: Path, num_threads: int) -> None:
        self._library = open_library(library)
        self._vocab_size = model.config.vocab_size
        self._block_size = pool.layout.block_size
        self._logits = torch.empty(0, self._vocab_size)
        # The library computes on this memory: it has to live as long as this object.
        self._kept: list[object] = [model, pool]
        described = self._describe(model.config, model.weights, pool)
        handle = self._library.baton_create(ctypes.byref(described), num_threads)
        if not handle:
            raise StartupError("no memory for the decode kernel")
        self._handle = handle
        weakref.finalize(self, self._library.baton_destroy, handle)

    def use_threads(self, num_threads: int) -> None:
        """Computes with so many threads from now on. Takes some ten microseconds a thread."""
        self._library.baton_use_threads(self._handle, num_threads)

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Computes the step, writes its keys and values into the pool, and returns logits.

        Returns float32 [slices that sample, vocab_size], in the order of the plan, valid until the next call.
        Blocks. The plan must fit (`BatchPlan.assert_fits`). MemoryError, with nothing done, when there is no room
        for intermediate results.
        """
        tables, starts = array("i"), array("i")
        for piece in plan.slices:
            starts.append(len(tables))
            tables.extend(piece.block_table[: piece.start_position // self._block_size + 1])
        tokens = array("i", [piece.token_ids[0] for piece in plan.slices])
        positions = array("i", [piece.start_position for piece in plan.slices])
        sampled = array("i", [row for row, piece in enumerate(plan.slices) if piece.sampling is not None])
        if len(sampled) > len(self._logits):
            self._logits = torch.empty(len(sampled), self._vocab_size)
        batch = Batch(
            rows=len(tokens),
            sampled=len(sampled),
            tokens=_address(tokens),
            positions=_address(positions),
            tables=_address(tables),
            table_starts=_address(starts),
            sampled_rows=_address(sampled),
            logits=self._logits.data_ptr(),
        )
        outcome = self._library.baton_step(self._handle, ctypes.byref(batch))
        if outcome == NO_MEMORY:
            raise MemoryError(f"a decode step of {len(tokens)} rows")
        assert outcome == OK, f"a token id is not below {self._vocab_size}"
        return self._logits[: len(sampled)]

    def _describe(self, config: DecoderConfig, weights: torch_weights.DecoderWeights, pool: KVPool) -> Model:
        embeddings = weights.embeddings
        table, scales = (
            (embeddings.values, embeddings.scales) if isinstance(embeddings, Int8Weight) else (embeddings, None)
        )
        weight_type = TYPES[str(table.dtype).removeprefix("torch.")]
        layers = (Layer * config.num_layers)(
            *(
                Layer(
                    input_norm=self._row(layer.input_norm, weight_type),
                    query_norm=self._plain(layer.query_norm),
                    key_norm=self._plain(layer.key_norm),
                    mlp_norm=self._row(layer.mlp_norm, weight_type),
                    qkv=self._linear(layer.qkv),
                    output=self._linear(layer.output),
                    gate_up=self._linear(layer.gate_up),
                    down=self._linear(layer.down),
                    window=window or 0,
                )
                for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
            )
        )
        self._kept.append(layers)
        assert len(set(config.sliding_windows) - {None}) <= 1, "windows of several sizes"
        return Model(
            type=weight_type,
            cache_type=TYPES[pool.layout.dtype],
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_layers,
            query_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=self._block_size,
            norm_epsilon=config.rms_norm_eps,
            rope_scale=config.rope_scale,
            inv_freq=self._plain(torch.tensor(config.inv_freq)),
            final_norm=self._row(weights.final_norm, weight_type),
            embeddings=table.data_ptr(),
            embedding_scale=None if scales is None else scales.data_ptr(),
            layer=layers,
            head=self._linear(weights.head),
            pool=pool.tensor.data_ptr(),
        )

    def _linear(self, linear: torch_weights.Linear) -> Linear:
        weight = linear.weight
        out_features, in_features = weight.shape
        described = Linear(bias=self._plain(linear.bias), out=out_features, in_=in_features)
        if isinstance(weight, Int8Weight):
            described.scale, weight = weight.scales.data_ptr(), weight.values
        assert weight.is_contiguous()
        described.weight = weight.data_ptr()
        return described

    def _plain(self, vector: torch.Tensor | None) -> int | None:
        """The address of a float32 copy."""
        if vector is None:
            return None
        copy = vector.to(torch.float32, copy=True).contiguous()
        self._kept.append(copy)
        return copy.data_ptr()

    def _row(self, vector: torch.Tensor, weight_type: int) -> int | None:
        """The address of a float32 copy in the order that products with the weights read, zeros at its end."""
        places = [self._library.baton_place(weight_type, index) for index in range(len(vector))]
        row = torch.zeros(self._library.baton_padded(len(vector)))
        row[places] = vector.to(torch.float32)
        return self._plain(row)


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]
