"""Where a read puts the source's blocks: the reader's own pool, whose blocks may be of another size or element type."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from baton.core.errors import InvalidArgumentError
from baton.engine.block_runs import copy_runs
from baton.engine.kv_pool import TORCH_DTYPES
from kv_transfer.errors import PoolMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.core.model import KVLayout
    from baton.engine.block_runs import CopyRun
    from baton.engine.kv_pool import KVPool
    from kv_transfer.descriptor import KVDescriptor, PeerKey

    Move = Callable[[int, int, int], object]
    """Copies as `ctypes.memmove(to, from, bytes)` does; the two never overlap here."""


def copy_on_cpu(
    source: torch.Tensor, destination: torch.Tensor, runs: Iterable[CopyRun], move: Move = ctypes.memmove
) -> None:
    """Copies runs of blocks, uint8 [num_blocks, block_bytes] both, with the interpreter's lock released.

    On this thread alone, and so not `Tensor.copy_`: that splits each copy over torch's threads and waits for all of
    them, while the other cores are busy with a step, or with another worker's.
    """
    block_bytes = source.shape[1]
    source_address, destination_address = source.data_ptr(), destination.data_ptr()
    for from_id, to_id, length in runs:
        move(destination_address + to_id * block_bytes, source_address + from_id * block_bytes, length * block_bytes)


def flat_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """A KV pool's tensor [num_blocks, ...] of any element type as uint8 [num_blocks, block_bytes], not copied."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


class Destination:
    """The reader's blocks `block_ids` of `into`, to be filled from `num_tokens` positions that lie as in `source`.

    `is_alike`: both sides' blocks have the same bytes, so whole blocks can be copied to `blocks`, uint8
    [num_blocks, block_bytes]. Otherwise the blocks go through `convert`.
    """

    def __init__(self, into: KVPool, block_ids: Sequence[int], source: KVLayout, num_tokens: int) -> None:
        ours = into.layout
        assert replace(ours, block_size=0, dtype="") == replace(source, block_size=0, dtype=""), "a handshake was made"
        assert len(block_ids) == ours.blocks_for(num_tokens), "as many blocks as the positions need"
        assert all(0 <= block_id < into.num_blocks for block_id in block_ids), "blocks of this pool"
        self.is_alike = ours == source
        self.block_ids = block_ids
        self.num_bytes = len(block_ids) * ours.block_bytes
        self._into = into
        self._source = source
        self._num_tokens = num_tokens

    @property
    def device(self) -> torch.device:
        """Where the reader's blocks are."""
        return self._into.device

    @property
    def blocks(self) -> torch.Tensor:
        """All blocks of the reader's pool: uint8 [num_blocks, block_bytes]."""
        return flat_blocks(self._into.tensor)

    def put(self, first: int, blocks: torch.Tensor) -> None:
        """Writes the source's blocks number `first` and following, uint8 [n, source's block_bytes], on any device."""
        if not self.is_alike:
            self.convert(first, blocks)
            return
        ids = self.block_ids[first : first + blocks.shape[0]]
        if blocks.device.type == "cpu" and self.device.type == "cpu":
            copy_on_cpu(blocks, self.blocks, copy_runs(range(len(ids)), ids))
            return
        for run in copy_runs(range(len(ids)), ids):
            self.blocks[run.destination : run.destination + run.length].copy_(
                blocks[run.source : run.source + run.length]
            )

    def convert(self, first: int, blocks: torch.Tensor) -> None:
        """As `put`, for blocks of another size or element type: position by position, in runs as long as can be."""
        theirs, ours = self._source.block_size, self._into.layout.block_size
        shape = (-1, self._source.num_layers, 2, theirs, self._source.num_kv_heads, self._source.head_dim)
        source = blocks.view(TORCH_DTYPES[self._source.dtype]).view(shape)
        position = first * theirs
        end = min(position + source.shape[0] * theirs, self._num_tokens)
        while position < end:
            (from_index, from_offset), (to_index, to_offset) = divmod(position, theirs), divmod(position, ours)
            length = min(theirs - from_offset, ours - to_offset, end - position)
            self._into.tensor[self.block_ids[to_index], :, :, to_offset : to_offset + length] = source[
                from_index - first, :, :, from_offset : from_offset + length
            ]
            position += length


def require_readable(descriptor: KVDescriptor, peer: PeerKey, layout: KVLayout) -> None:
    """Raises unless the descriptor is of this life of this peer and its blocks are as many as its tokens need."""
    if descriptor.peer != peer:
        raise PoolMismatchError(f"a lease of {descriptor.peer} cannot be read from the pool of {peer}")
    descriptor.require_fits(layout)
    if descriptor.generation == 0:  # the word of a slot without a lease
        raise InvalidArgumentError("kv.generation", "must not be 0")
