"""What the ranks of a tensor-parallel group say to each other within a step: sums and joins of tensors.

Each rank is a process of this host with one part of the model. The communicator is Gloo's on CPUs and NCCL's between
CUDA devices. The ranks find each other through a file without a name, so that nobody else can.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from baton.core.errors import StartupError
from baton.engine.sharding import Shard

_LOOPBACK = "127.0.0.1"


class RankGroup:
    """One rank's end. `store_fd` is the file that all ranks have inherited; used from one thread.

    Every call is collective: it returns when all ranks have made it. It raises RuntimeError when a rank has left or
    is more than `timeout_s` behind; all must then `leave` and `join` anew before anything else.
    """

    def __init__(self, shard: Shard, store_fd: int, *, device: torch.device, timeout_s: float) -> None:
        self.shard = shard
        self._store_path = f"/proc/self/fd/{store_fd}"
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._communicator: Any = None

    def join(self, epoch: int) -> None:
        """Connects the ranks. `epoch` is the same for all of them and was never used before."""
        store = dist.PrefixStore(str(epoch), dist.FileStore(self._store_path, -1))  # type: ignore[attr-defined]
        make = _gloo if self._device.type == "cpu" else _nccl
        self._communicator = make(store, self.shard, self._timeout)

    def leave(self) -> None:
        """Ends whatever the other ranks wait for. Repeating it is harmless."""
        if self._communicator is not None and self._device.type != "cpu":
            self._communicator.abort()
        # Gloo's connections, which the others watch, close with their last owner; its `abort` leaves them open.
        self._communicator = None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of all ranks added up, the same to the bit on each, in the place of `x`."""
        self._communicator.allreduce([x]).wait()
        return x

    def side_by_side(self, part: torch.Tensor, total: int) -> torch.Tensor:
        """The ranks' parts [rows, this rank's cut of total], one after another: [rows, total]."""
        counts = [Shard(rank, self.shard.size).cut(total).count for rank in range(self.shard.size)]
        widest = max(counts)
        own = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in counts]
        self._communicator.allgather([parts], [own]).wait()
        return torch.cat([each[:, :count] for each, count in zip(parts, counts, strict=True)], dim=1)


def _gloo(store: Any, shard: Shard, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, shard.rank, shard.size, options)


def _nccl(store: Any, shard: Shard, timeout: timedelta) -> Any:
    if not dist.is_nccl_available():
        raise StartupError("engine.tensor_parallel_size: this build of PyTorch has no NCCL, which CUDA ranks need")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, shard.rank, shard.size, options)
