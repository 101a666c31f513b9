"""What the ranks of a group compute on: their devices, whether they share a pool, and how they talk within a step.

Picklable, for it goes to each rank. Imports torch only where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.rank_group import RankGroup
    from baton.engine.sharding import Shard


class RankHardware(Protocol):
    """The hardware of a group."""

    @property
    def has_own_pools(self) -> bool:
        """Whether each rank has a pool of its own heads, instead of all having one mapped."""
        ...

    def device(self, rank: int) -> str:
        """Where a rank computes."""
        ...

    def meeting_bytes(self, size: int) -> int:
        """How large the file is, at first, through which the ranks meet."""
        ...

    def open_group(
        self, shard: Shard, meeting_fd: int, *, timeout_s: float, check: Callable[[], None] | None
    ) -> RankGroup:
        """One rank's end of the group, not joined yet. StartupError. `check` may raise while others are waited for."""
        ...


class HostRanks:
    """Ranks on the CPU of one host, over one pool."""

    has_own_pools = False

    def device(self, rank: int) -> str:
        """See `RankHardware.device`."""
        return "cpu"

    def meeting_bytes(self, size: int) -> int:
        """See `RankHardware.meeting_bytes`."""
        from baton.engine.host_group import HostGroup

        return HostGroup.num_bytes(size)

    def open_group(
        self, shard: Shard, meeting_fd: int, *, timeout_s: float, check: Callable[[], None] | None
    ) -> RankGroup:
        """See `RankHardware.open_group`."""
        from baton.engine.host_group import HostGroup
        from baton.engine.host_memory import SharedMemory

        memory = SharedMemory(meeting_fd, 0, self.meeting_bytes(shard.size))
        return HostGroup(shard, memory, timeout_s=timeout_s, check=check)


class CudaRanks:
    """Ranks on the first CUDA devices of one host, one each, that talk by NCCL."""

    has_own_pools = True

    def device(self, rank: int) -> str:
        """See `RankHardware.device`."""
        return f"cuda:{rank}"

    def meeting_bytes(self, size: int) -> int:
        """See `RankHardware.meeting_bytes`."""
        return 0

    def open_group(
        self, shard: Shard, meeting_fd: int, *, timeout_s: float, check: Callable[[], None] | None
    ) -> RankGroup:
        """See `RankHardware.open_group`."""
        import torch

        from baton.engine.nccl_group import NcclGroup

        torch.cuda.set_device(self.device(shard.rank))
        return NcclGroup(shard, meeting_fd, timeout_s=timeout_s)


def ranks_on(device: str) -> RankHardware:
    """The hardware of a group on `device`, as the settings have it: cpu, cuda or cuda:N."""
    return HostRanks() if device == "cpu" else CudaRanks()


def require_whole_host(size: int, device: str) -> None:
    """StartupError where several ranks are to be on one CUDA device that was chosen by its number."""
    if size > 1 and device not in ("cpu", "cuda"):
        raise StartupError(
            f"engine.device: must be cpu or cuda for {size} ranks, got {device}: they take the first CUDA devices, and "
            "CUDA_VISIBLE_DEVICES says which those are"
        )
