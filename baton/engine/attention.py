"""Attention of one step over the paged pool: what computes it, and PyTorch's way.

What depends on the plan alone (which rows, which blocks, which masks) is worked out once a step; layers then
only index and multiply. By PyTorch rows of one token (decode) run together, padded, in groups of similar length.
Chunks of several tokens (prefill) run one by one, because each has its own triangle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan, SequenceSlice
    from baton.engine.kv_pool import KVPool

# A row joins a group as long as it is at least this part of the group's longest: bounds the padding.
MIN_GROUP_FILL = 0.5


class StepAttention(Protocol):
    """A step's attention in the layers that share one window."""

    def run(self, queries: torch.Tensor, keys_values: torch.Tensor, pool: KVPool, layer: int) -> torch.Tensor:
        """Attends from `queries` [tokens, num_kv_heads, queries per KV head, head_dim] in one layer.

        `keys_values` [tokens, 2, num_kv_heads, head_dim] are the step's own, which the pool must already hold.
        Returns [tokens, num_kv_heads * queries per KV head * head_dim] in the queries' dtype.
        """
        ...


class PagedAttention(Protocol):
    """What computes attention over the pool: PyTorch, this project's kernels on a CPU, or FlashInfer on CUDA."""

    @property
    def name(self) -> str:
        """Which of them it is."""
        ...

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> StepAttention:
        """Works a step out for the layers with that window. The step must fit (`BatchPlan.assert_fits`).

        What comes back is good until the next plan for the same window.
        """
        ...


class TorchAttention:
    """Implements `PagedAttention` by PyTorch alone, anywhere: the reference for the others. Computes in `dtype`."""

    name = "torch"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def plan(self, plan: BatchPlan, pool: KVPool, window: int | None) -> AttentionPlan:
        """See `PagedAttention.plan`."""
        return AttentionPlan.build(plan, pool, window=window, dtype=self._dtype)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One-token rows: `rows` [n] in the flat batch, `slabs` [2, n, blocks] in layer 0, `mask` [n, 1, 1, keys]."""

    rows: torch.Tensor
    slabs: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows `first_row` up to `end_row` of the flat batch, one sequence.

    `slabs` [2, blocks] in layer 0 hold the first `num_keys` keys that any of its tokens sees, and `mask` is
    [tokens, num_keys]. Both are None for a chunk that starts its sequence and sees all of itself.
    """

    first_row: int
    end_row: int
    num_keys: int
    slabs: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention in the layers that share one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[PrefillChunk, ...]

    @classmethod
    def build(cls, plan: BatchPlan, pool: KVPool, *, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        """Works out rows, blocks and masks; `dtype` is the one that attention computes in."""
        singles: list[tuple[int, SequenceSlice]] = []
        chunks: list[PrefillChunk] = []
        row = 0
        for piece in plan.slices:
            if len(piece.token_ids) == 1:
                singles.append((row, piece))
            else:
                chunks.append(_chunk(piece, row, pool, window, dtype))
            row += len(piece.token_ids)
        groups = [_group(members, pool, window, dtype) for members in _by_length(singles, window)]
        return cls(tuple(groups), tuple(chunks))

    def run(self, queries: torch.Tensor, keys_values: torch.Tensor, pool: KVPool, layer: int) -> torch.Tensor:
        """See `StepAttention.run`."""
        output = torch.empty_like(queries)
        for group in self.groups:
            output[group.rows] = self._decode(group, queries, pool, layer)
        for chunk in self.chunks:
            output[chunk.first_row : chunk.end_row] = self._prefill(chunk, queries, keys_values, pool, layer)
        return output.flatten(1)

    @staticmethod
    def _decode(group: DecodeGroup, queries: torch.Tensor, pool: KVPool, layer: int) -> torch.Tensor:
        dtype = group.mask.dtype
        keys, values = _gather(pool, group.slabs, layer).to(dtype).transpose(2, 3)
        # The queries that share a KV head stand where a longer query would: the cache is read once for all of them.
        return scaled_dot_product_attention(queries[group.rows].to(dtype), keys, values, attn_mask=group.mask).to(
            queries.dtype
        )

    @staticmethod
    def _prefill(
        chunk: PrefillChunk, queries: torch.Tensor, keys_values: torch.Tensor, pool: KVPool, layer: int
    ) -> torch.Tensor:
        dtype = attention_dtype(queries.dtype, queries.device)
        own = queries[chunk.first_row : chunk.end_row].to(dtype).permute(1, 2, 0, 3)
        if chunk.slabs is None:
            both = keys_values[chunk.first_row : chunk.end_row].transpose(0, 1)
        else:
            both = _gather(pool, chunk.slabs, layer)[:, : chunk.num_keys]
        # [2, num_kv_heads, queries per KV head (a stride of 0), keys, head_dim]
        keys, values = both.to(dtype).transpose(1, 2).unsqueeze(2).expand(-1, -1, own.shape[1], -1, -1)
        mixed = scaled_dot_product_attention(own, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
        return mixed.permute(2, 0, 1, 3).to(queries.dtype)


def attention_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What attention computes in: float32 on CPUs, whose half-precision kernels are measurably slower than that."""
    return torch.float32 if device.type == "cpu" else dtype


def _gather(pool: KVPool, slabs: torch.Tensor, layer: int) -> torch.Tensor:
    """Blocks `slabs` [..., blocks] of a layer as [..., blocks * block_size, num_kv_heads, head_dim], copied."""
    layout = pool.layout
    rows = pool.slabs_view().index_select(0, (slabs + 2 * layer).view(-1))
    return rows.view(*slabs.shape[:-1], -1, layout.num_kv_heads, layout.head_dim)


def _by_length(singles: list[tuple[int, SequenceSlice]], window: int | None) -> list[list[tuple[int, SequenceSlice]]]:
    """Groups rows so that none is padded beyond twice its length."""

    def num_keys(single: tuple[int, SequenceSlice]) -> int:
        length = single[1].end_position
        return length if window is None else min(length, window)

    groups: list[list[tuple[int, SequenceSlice]]] = []
    longest = 0
    for single in sorted(singles, key=num_keys, reverse=True):
        if not groups or num_keys(single) < MIN_GROUP_FILL * longest:
            groups.append([])
            longest = num_keys(single)
        groups[-1].append(single)
    return groups


def _first_block(position: int, window: int | None, block_size: int) -> int:
    """The block with the earliest key that the token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def _slabs(block_ids: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Rows of the pool's slabs view for layer 0, keys first: [2, ...]."""
    keys = block_ids * (layout.num_layers * 2)
    return torch.stack((keys, keys + 1))


def _group(
    members: list[tuple[int, SequenceSlice]], pool: KVPool, window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    block_size = pool.layout.block_size
    tables: list[list[int]] = []
    first_positions: list[int] = []
    for _, piece in members:
        first = _first_block(piece.start_position, window, block_size)
        tables.append(list(piece.block_table[first : piece.start_position // block_size + 1]))
        first_positions.append(first * block_size)
    width = max(len(table) for table in tables)
    for table in tables:
        table.extend([table[-1]] * (width - len(table)))
    device = pool.device
    # Each row's own position, and its window's edge, counted from the first key gathered for it.
    last_key = torch.tensor(
        [piece.start_position - first for (_, piece), first in zip(members, first_positions, strict=True)],
        device=device,
    )[:, None]
    key = torch.arange(width * block_size, device=device)
    hidden = key > last_key
    if window is not None:
        hidden |= key <= last_key - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    rows = torch.tensor([row for row, _ in members], device=device)
    slabs = _slabs(torch.tensor(tables, device=device), pool.layout)
    return DecodeGroup(rows, slabs, mask[:, None, None, :])


def _chunk(piece: SequenceSlice, row: int, pool: KVPool, window: int | None, dtype: torch.dtype) -> PrefillChunk:
    num_tokens, end = len(piece.token_ids), piece.end_position
    if piece.start_position == 0 and (window is None or num_tokens <= window):
        return PrefillChunk(row, row + num_tokens, num_tokens, None, None)
    block_size, device = pool.layout.block_size, pool.device
    first = _first_block(piece.start_position, window, block_size)
    block_ids = torch.tensor(list(piece.block_table[first : (end - 1) // block_size + 1]), device=device)
    key = torch.arange(first * block_size, end, device=device)
    position = torch.arange(piece.start_position, end, device=device)[:, None]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return PrefillChunk(row, row + num_tokens, len(key), _slabs(block_ids, pool.layout), mask)
