"""Queries, keys and values of a step's tokens: rotated by their positions, and written into the paged pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import rms_norm

if TYPE_CHECKING:
    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig
    from baton.engine.step_inputs import StepInputs
    from baton.engine.weights import LayerWeights

# Cosines and sines of the angles of each token, [tokens, head_dim / 2].
Rotary = tuple[torch.Tensor, torch.Tensor]


class StepHeads(Protocol):
    """What is done in each layer of one step to the heads that its first product gives."""

    def run(self, heads: torch.Tensor, layer: LayerWeights, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [tokens, (heads + 2 KV heads) * head_dim] of layer `index`, which it changes.

        Returns rotated queries [tokens, KV heads, queries each, head_dim], and [tokens, 2, KV heads, head_dim] keys and
        values, which the pool holds then.
        """
        ...


class TorchHeads:
    """Implements `StepHeads` by PyTorch alone: the reference for others. `rotary` is of the step's tokens."""

    def __init__(self, config: DecoderConfig, rotary: Rotary, inputs: StepInputs, pool: KVPool) -> None:
        cos, sin = rotary
        self._config = config
        # Both halves of a head at once: [tokens, 1, 2, head_dim / 2], sines with the first half negated.
        self._cos = torch.stack((cos, cos), 1)[:, None]
        self._signed_sin = torch.stack((-sin, sin), 1)[:, None]
        self._pool_rows = inputs.pool_rows
        self._pool = pool

    def run(self, heads: torch.Tensor, layer: LayerWeights, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepHeads.run`."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = heads.view(-1, num_rotated + config.num_kv_heads, config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._norm(heads[:, : config.num_heads], layer.query_norm)
            self._norm(heads[:, config.num_heads : num_rotated], layer.key_norm)
        halves = heads[:, :num_rotated].view(-1, num_rotated, 2, config.head_dim // 2)
        torch.addcmul(halves * self._cos, halves.flip(2), self._signed_sin, out=halves)
        queries, keys_values = split_heads(config, heads)
        keys_values = keys_values.to(self._pool.tensor.dtype)
        _write(self._pool, self._pool_rows, index, keys_values)
        return queries, keys_values

    def _norm(self, heads: torch.Tensor, weight: torch.Tensor) -> None:
        heads[:] = rms_norm(heads, (heads.shape[-1],), weight.to(heads.dtype), self._config.rms_norm_eps)


def split_heads(config: DecoderConfig, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `StepHeads.run` returns, as views of [tokens, heads + 2 KV heads, head_dim]."""
    queries, keys_values = heads[:, : config.num_heads], heads[:, config.num_heads :]
    return (
        queries.view(len(heads), config.num_kv_heads, -1, config.head_dim),
        keys_values.view(-1, 2, config.num_kv_heads, config.head_dim),
    )


def _write(pool: KVPool, rows: torch.Tensor, layer: int, keys_values: torch.Tensor) -> None:
    """Puts [tokens, 2, KV heads, head_dim] into the pool: `rows` are those of layer 0."""
    view = pool.positions_view()
    view.index_copy_(0, rows + layer * 2 * pool.layout.block_size, keys_values.reshape(-1, view.shape[1]))
