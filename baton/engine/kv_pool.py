"""The memory that keys and values live in."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from baton.core.errors import StartupError
from baton.engine.host_memory import SharedMemory, allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.model import KVLayout
    from baton.engine.sharding import Shard

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`; StartupError when the engine does not compute in it."""
    if name not in TORCH_DTYPES:
        raise StartupError(f"dtype: {name!r} is not supported; choose one of {', '.join(sorted(TORCH_DTYPES))}")
    return TORCH_DTYPES[name]


class KVPool:
    """Blocks of keys and values of every layer, in one contiguous tensor.

    The pool only holds memory: which sequence owns a block is kept by `BlockPool` and its users. `tensor` is
    [num_blocks, num_layers, 2 (key, value), block_size, num_kv_heads, head_dim] of `layout.dtype`. With
    `storage`, a flat uint8 tensor such as a mapped shared segment, the pool lies over the first
    `num_blocks * layout.block_bytes` bytes of it and the caller keeps the segment mapped while the pool is in use;
    without, the pool allocates its own memory on `device`. `shared` is where child processes find the same memory, if
    they can. Raises StartupError when the memory does not suffice.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        storage: torch.Tensor | None = None,
        shared: SharedMemory | None = None,
        device: str = "cpu",
    ) -> None:
        if num_blocks < 1:
            raise StartupError(f"kv_cache_bytes: too small for one block of {layout.block_bytes} bytes")
        self.layout = layout
        self.num_blocks = num_blocks
        self.shared = shared
        num_bytes = num_blocks * layout.block_bytes
        if storage is None:
            storage = _allocate(num_bytes, device)
        elif storage.dtype != torch.uint8 or storage.dim() != 1 or storage.numel() < num_bytes:
            raise StartupError(
                f"KV storage: need a flat uint8 tensor of at least {num_bytes} bytes for {num_blocks} blocks, "
                f"got {storage.dtype} {tuple(storage.shape)}"
            )
        shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.tensor = storage[:num_bytes].view(torch_dtype(layout.dtype)).view(shape)

    @property
    def device(self) -> torch.device:
        """Where the pool's memory is."""
        return self.tensor.device

    @classmethod
    def in_shared_memory(cls, layout: KVLayout, num_blocks: int) -> KVPool:
        """A pool on the CPU that child processes can map. Raises as the constructor does."""
        num_bytes = num_blocks * layout.block_bytes
        _require_physical(num_bytes)
        try:
            memory = SharedMemory.create(num_bytes)
            return cls(layout, num_blocks, storage=memory.map(), shared=memory)
        except MemoryError as error:
            raise StartupError(f"kv_cache_bytes: cannot allocate {num_bytes} bytes: {error}") from error

    def part(self, shard: Shard) -> KVPool:
        """The same memory with the KV heads of one rank alone: what it reads and writes in each block.

        Its tensor is not contiguous, unless the shard is the whole.
        """
        heads = shard.cut(self.layout.num_kv_heads)
        part = copy(self)
        part.layout = replace(self.layout, num_kv_heads=heads.count)
        part.tensor = self.tensor[..., heads.first : heads.first + heads.count, :]
        return part

    def copy_blocks(self, source_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copies blocks within the pool, before the steps that begin afterwards. No block is on both sides."""
        device = self.tensor.device
        source = torch.tensor(source_ids, device=device)
        self.tensor[torch.tensor(block_ids, device=device)] = self.tensor[source]

    def positions_view(self) -> torch.Tensor:
        """The same memory as [num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim]: a row a position."""
        return self.tensor.view(-1, self.layout.num_kv_heads * self.layout.head_dim)

    def slabs_view(self) -> torch.Tensor:
        """The same memory as [num_blocks * num_layers * 2, block_size, num_kv_heads * head_dim].

        Row `(block_id * num_layers + layer) * 2 + part` has one block's keys (part 0) or values (part 1) of a layer.
        """
        return self.tensor.view(-1, self.layout.block_size, self.layout.num_kv_heads * self.layout.head_dim)


def _require_physical(num_bytes: int) -> None:
    # Linux grants more memory than the machine has and kills the process on touch, so ask first.
    physical_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > physical_bytes:
        raise StartupError(f"kv_cache_bytes: {num_bytes} bytes of KV blocks, the machine has {physical_bytes}")


def _allocate(num_bytes: int, device: str) -> torch.Tensor:
    if device == "cpu":
        _require_physical(num_bytes)
    try:
        return allocate(num_bytes) if device == "cpu" else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except (MemoryError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"kv_cache_bytes: cannot allocate {num_bytes} bytes on {device}: {reason}") from error
