"""A prefill engine's pool with the ways that lead to it, in the prefill engine process."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_transfer.descriptor import Transport
from kv_transfer.shm import ShmPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
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
    """The memory that readers see, and the senders that were started for it.

    `device` is a pool in device memory. `host` is in shared memory: the pool itself, or the host copy of one in device
    memory, or of those that several ranks have.
    """

    def __init__(self, spec: SegmentSpec, *, device: CudaIpcPool | None = None, host: ShmPool | None = None) -> None:
        assert device is not None or host is not None, "a source without memory"
        self._spec = spec
        self._device = device
        self._host = host
        self._senders: list[DistSource] = []

    @classmethod
    def create(cls, spec: SegmentSpec, device: str, *, host_copy: bool = False) -> Self:
        """Allocates the pool on `device`, and its host copy if there is to be one beside it; StartupError: no room.

        Ranks that have pools of their own need `cpu` alone: it is their host copy then.
        """
        if device == "cpu":
            return cls(spec, host=_shared(spec))
        from kv_transfer.cuda_ipc import CudaIpcPool

        host = _shared(spec) if host_copy else None
        try:
            return cls(spec, device=CudaIpcPool.create(spec, device), host=host)
        except BaseException:
            if host is not None:
                host.close()
            raise

    @property
    def storage(self) -> torch.Tensor:
        """The pool's blocks: flat uint8, for `KVPool(layout, num_blocks, storage)`."""
        pool = self._device or self._host
        assert pool is not None, "a source without memory"
        return pool.storage

    @property
    def host_copy(self) -> torch.Tensor | None:
        """The blocks of the copy of a pool in device memory, if it has one: as `storage`."""
        return None if self._device is None or self._host is None else self._host.storage

    def share(self) -> SharedMemory | None:
        """The shared memory for child processes, to be closed by the caller; None where there is none."""
        return None if self._host is None else self._host.share()

    @property
    def fences(self) -> FenceTable:
        """The fence words, for the `LeaseTable`."""
        tables = [each.fences for each in (self._device, self._host) if each is not None]
        return tables[0] if len(tables) == 1 else _Fences(tables)

    @property
    def handles(self) -> tuple[PoolHandle, ...]:
        """The ways that there are so far."""
        memory = [each.handle for each in (self._device, self._host) if each is not None and each.handle is not None]
        return (*memory, *(sender.handle for sender in self._senders))

    def start_senders(
        self, enabled: Iterable[Transport], leases: LeaseTable, secrets: PairSecrets, place: DistPlace
    ) -> None:
        """Starts what sends over torch.distributed, if that is enabled and there is memory that it can send from."""
        enabled = set(enabled)
        for transport, memory in ((Transport.NCCL, self._device), (Transport.GLOO, self._host)):
            if transport in enabled and memory is not None:
                from kv_transfer.dist_source import DistSource

                blocks = memory.storage.view(self._spec.num_blocks, -1)
                self._senders.append(DistSource(transport, blocks, leases.find, secrets, place))

    def close(self) -> None:
        """Ends the senders and gives up the memory. Repeating it is harmless."""
        for sender in self._senders:
            sender.close()
        self._senders.clear()
        for memory in (self._device, self._host):
            if memory is not None:
                memory.close()


class _Fences:
    """Several tables with the same words: whichever a reader looks at, it sees the lease end before its blocks go."""

    def __init__(self, tables: Sequence[FenceTable]) -> None:
        self._tables = tables
        self.num_slots = min(table.num_slots for table in tables)

    def store(self, slot: int, word: int) -> None:
        for table in self._tables:
            table.store(slot, word)


def _shared(spec: SegmentSpec) -> ShmPool:
    return ShmPool.create(spec.layout, spec.num_blocks, incarnation=spec.incarnation, num_slots=spec.num_slots)
