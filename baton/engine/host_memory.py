"""Large pieces of memory on the CPU's side."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

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
    return _as_tensor(mapping, num_bytes)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that child processes can map too: `num_bytes` from `offset_bytes` on, in the open file `fd`.

    `offset_bytes` is a multiple of the page size. The memory lives as long as a process has it open or mapped.
    """

    fd: int
    offset_bytes: int
    num_bytes: int

    @classmethod
    def create(cls, num_bytes: int) -> SharedMemory:
        """Zeroed memory in a file without a name, so that nothing of it outlives its processes. Raises MemoryError."""
        fd = os.memfd_create("baton")
        try:
            os.ftruncate(fd, num_bytes)
        except OSError as error:
            os.close(fd)
            raise MemoryError(f"{num_bytes} bytes: {error.strerror}") from error
        return cls(fd, 0, num_bytes)

    def map(self) -> torch.Tensor:
        """The memory as a flat uint8 tensor that keeps it. Raises MemoryError."""
        try:
            mapping = mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED, offset=self.offset_bytes)
        except OSError as error:
            raise MemoryError(f"{self.num_bytes} bytes: {error.strerror}") from error
        return _as_tensor(mapping, self.num_bytes)

    def close(self) -> None:
        """Closes the file, once: whoever has mapped it keeps the memory."""
        os.close(self.fd)


def _as_tensor(mapping: mmap.mmap, num_bytes: int) -> torch.Tensor:
    with suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
