"""A prefill engine's pool with the ways that lead to it, in the prefill engine process."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer import choice
from kv_transfer.descriptor import Transport
from kv_transfer.shm import ShmPool

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    import torch

    from baton.core.settings import ServerSettings
    from baton.engine.host_memory import SharedMemory
    from kv_transfer.cuda_ipc import CudaIpcPool
    from kv_transfer.descriptor import PoolHandle
    from kv_transfer.dist_source import DistSource
    from kv_transfer.lease import FenceTable, LeaseTable
    from kv_transfer.pairs import PairSecrets
    from kv_transfer.segment import SegmentSpec


_EVERYWHERE = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistPlace:
    """Where a source listens, under which host name readers find it, and for how long it waits for progress."""

    host: str
    advertised_host: str
    timeout_s: float

    @classmethod
    def beside(cls, server: ServerSettings, timeout_s: float) -> Self:
        """On the address of the worker's server. One that stands for all addresses becomes this machine's name."""
        host = socket.gethostname() if server.host in _EVERYWHERE else server.host
        return cls(host=host, advertised_host=server.advertise_host or host, timeout_s=timeout_s)


class SourcePool:
    """The memory, in device or shared memory, and the senders that were started for it."""

    def __init__(self, backing: ShmPool | CudaIpcPool, spec: SegmentSpec, device: str) -> None:
        self._backing = backing
        self._spec = spec
        self._device = device
        self._senders: list[DistSource] = []

    @classmethod
    def create(cls, spec: SegmentSpec, device: str) -> Self:
        """Allocates the pool where the engine computes; StartupError when it does not fit."""
        if device.startswith("cuda"):
            from kv_transfer.cuda_ipc import CudaIpcPool

            return cls(CudaIpcPool.create(spec, device), spec, device)
        backing = ShmPool.create(spec.layout, spec.num_blocks, incarnation=spec.incarnation, num_slots=spec.num_slots)
        return cls(backing, spec, device)

    @property
    def storage(self) -> torch.Tensor:
        """The blocks: flat uint8, for `KVPool(layout, num_blocks, storage)`."""
        return self._backing.storage

    def share(self) -> SharedMemory | None:
        """The same memory for child processes, to be closed by the caller; None for device memory."""
        return self._backing.share() if isinstance(self._backing, ShmPool) else None

    @property
    def fences(self) -> FenceTable:
        """The fence words, for the `LeaseTable`."""
        return self._backing.fences

    @property
    def handles(self) -> tuple[PoolHandle, ...]:
        """The ways that there are so far."""
        memory = () if self._backing.handle is None else (self._backing.handle,)
        return (*memory, *(sender.handle for sender in self._senders))

    def start_senders(
        self, enabled: Iterable[Transport], leases: LeaseTable, secrets: PairSecrets, place: DistPlace
    ) -> None:
        """Starts what sends over torch.distributed, if that is enabled and fits the pool's device."""
        for transport in choice.usable(enabled, self._device):
            if transport in (Transport.NCCL, Transport.GLOO):
                from kv_transfer.dist_source import DistSource

                blocks = self.storage.view(self._spec.num_blocks, -1)
                self._senders.append(DistSource(transport, blocks, leases.find, secrets, place))

    def close(self) -> None:
        """Ends the senders and gives up the memory. Repeating it is harmless."""
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        self._backing.close()
