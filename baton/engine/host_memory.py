"""Large pieces of memory on the CPU's side."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def allocate(num_bytes: int) -> torch.Tensor:
    """Zeroed memory as a flat uint8 tensor, in huge pages where the system grants them; pages come with first use.

    Reading weights and caches once a step is a walk through all of memory: with small pages, a fifth of the time goes
    into finding them. Raises MemoryError.
    """
    try:
        mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error.strerror}") from error
    with suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
