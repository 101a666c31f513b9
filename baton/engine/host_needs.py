"""Host memory that a worker takes beside its pool. Imports no torch: server processes name it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """`swap_bytes` are for blocks that left the pool; `copies_pool`: a pool in device memory is to have a host copy.

    Several ranks on CUDA have one in any case.
    """

    swap_bytes: int = 0
    copies_pool: bool = False
