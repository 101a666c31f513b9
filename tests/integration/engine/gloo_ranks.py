"""The twin of ranks on CUDA on a CPU: a pool for each, and torch's process groups, by Gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from baton.engine.rank_group import RankGroup
    from baton.engine.sharding import Shard


def by_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """On the loopback address: the machine's name is not asked for, which may take many seconds."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


class GlooRanks:
    """A `RankHardware` that differs from CUDA's in the device and the backend alone."""

    has_own_pools = True

    def device(self, rank: int) -> str:
        return "cpu"

    def meeting_bytes(self, size: int) -> int:
        return 0

    def open_group(
        self, shard: Shard, meeting_fd: int, *, timeout_s: float, check: Callable[[], None] | None
    ) -> RankGroup:
        from baton.engine.nccl_group import NcclGroup

        return NcclGroup(shard, meeting_fd, timeout_s=timeout_s, connect=by_gloo)
