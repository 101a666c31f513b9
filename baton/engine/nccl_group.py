"""Sums and joins between ranks on CUDA devices of one host, by NCCL."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from baton.core.errors import StartupError
from baton.engine.rank_group import GroupBrokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from baton.engine.sharding import Shard


class NcclGroup:
    """Implements `RankGroup`. The ranks find each other through `meeting_fd`, an empty file that all have inherited.

    A rank that is gone shows itself when the results are read: torch ends the process after `timeout_s`. `connect`
    makes one of torch's process groups from a store, rank, size and time-out.
    """

    def __init__(
        self, shard: Shard, meeting_fd: int, *, timeout_s: float, connect: Callable[..., Any] | None = None
    ) -> None:
        if connect is None and not dist.is_nccl_available():
            raise StartupError("engine.tensor_parallel_size: this build of PyTorch has no NCCL, which CUDA ranks need")
        self.shard = shard
        self._file = f"/proc/self/fd/{meeting_fd}"
        self._timeout = timedelta(seconds=timeout_s)
        self._connect = connect or _by_nccl
        self._communicator: Any = None

    def join(self, epoch: int) -> None:
        """See `RankGroup.join`."""
        self.leave()
        store = dist.PrefixStore(str(epoch), dist.FileStore(self._file, -1))  # type: ignore[attr-defined]
        with _breaking():
            self._communicator = self._connect(store, self.shard.rank, self.shard.size, self._timeout)

    def leave(self) -> None:
        """See `RankGroup.leave`."""
        if self._communicator is not None:
            self._communicator.abort()
        self._communicator = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `RankGroup.sum`. Enqueued only."""
        with _breaking():
            self._communicator.allreduce([x]).wait()
        return x

    def side_by_side(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """See `RankGroup.side_by_side`. Enqueued only."""
        cuts = self.shard.cuts(total)
        widest = max(cut.count for cut in cuts)
        own = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in cuts]
        with _breaking():
            self._communicator.allgather([parts], [own]).wait()
        return torch.cat([each[:, : cut.count] for each, cut in zip(parts, cuts, strict=True)], dim=1)


def _by_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _breaking() -> Iterator[None]:
    """Torch's errors as ours."""
    try:
        yield
    except RuntimeError as error:
        raise GroupBrokenError(str(error).splitlines()[0]) from error
