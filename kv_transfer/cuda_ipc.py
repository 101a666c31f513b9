"""Handover through device memory of one host: the source's pool is mapped by its readers, once a pair of workers.

The blocks lie in device memory, the fence table in a segment of shared memory without blocks. Leases end and begin on
the CPU, so the fence tells about device memory what it tells about shared memory: the source grants a lease when the
kernels that wrote the blocks are done, and reuses blocks only after it has cleared the word. A copy is over when the
event behind it is; only then is the fence looked at again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

import torch

from baton.core.errors import StartupError
from kv_transfer.descriptor import CudaIpcHandle, ShmHandle
from kv_transfer.errors import NoTransportError
from kv_transfer.fenced import FencedReader
from kv_transfer.segment import Segment, SegmentSpec, SegmentView, reap_stale_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from baton.core.model import KVLayout
    from baton.engine.block_runs import CopyRun
    from kv_transfer.descriptor import PeerPool
    from kv_transfer.lease import FenceTable

_log = logging.getLogger(__name__)


class Cuda(Protocol):
    """The few things that are asked of CUDA. `TorchCuda` is the real one."""

    def share(self, storage: torch.Tensor, *, num_blocks: int, fence_segment: str) -> CudaIpcHandle:
        """A handle by which another process maps `storage`. RuntimeError when the allocator can't share it."""
        ...

    def map(self, handle: CudaIpcHandle) -> torch.Tensor:
        """The memory behind a handle, flat uint8. NoTransportError when this process can't see the device."""
        ...

    def side_stream(self, device: torch.device) -> Callable[[Callable[[], None]], None]:
        """A stream beside the engine's: a function that runs a job's kernels on it and returns when they are done."""
        ...


class CudaIpcPool:
    """The source's side, in the prefill engine process, with the shape of `ShmPool`."""

    def __init__(self, segment: Segment, storage: torch.Tensor, handle: CudaIpcHandle | None) -> None:
        self._segment = segment
        self.storage = storage
        self.handle = handle

    @classmethod
    def create(cls, spec: SegmentSpec, device: str, cuda: Cuda | None = None) -> Self:
        """Allocates the pool on `device` and its fence table in shared memory; StartupError when either doesn't fit.

        `handle` is None, and a warning says why, where the allocator's memory cannot be shared.
        """
        reap_stale_segments()
        num_bytes = spec.num_blocks * spec.layout.block_bytes
        try:
            storage = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StartupError(f"kv_cache_bytes: cannot allocate {num_bytes} bytes on {device}: {reason}") from error
        segment = Segment.create(fence_table(spec))
        try:
            handle = (cuda or TorchCuda()).share(
                storage, num_blocks=spec.num_blocks, fence_segment=segment.handle.segment
            )
        except RuntimeError as error:
            _log.warning("this pool cannot be read through cuda_ipc: %s", str(error).splitlines()[0])
            handle = None
        return cls(segment, storage, handle)

    @property
    def fences(self) -> FenceTable:
        """The fence words."""
        return self._segment

    def close(self) -> None:
        """Clears all fence words and unlinks their segment. Repeating it is harmless."""
        self._segment.close()


class CudaIpcReader(FencedReader):
    """The reader's side: a source's pool mapped, in the decode engine process."""

    @classmethod
    def open(cls, pool: PeerPool, handle: CudaIpcHandle, cuda: Cuda | None = None) -> Self:
        """Maps the pool.

        PeerGoneError when its fence table is gone, NoTransportError when this process does not see its device,
        PoolMismatchError when it is not what `pool` and `handle` say.
        """
        fences = SegmentView.open(pool.peer, pool.layout, ShmHandle(segment=handle.fence_segment, num_blocks=0))
        try:
            return cls(pool.peer, pool.layout, _DeviceBlocks(fences, handle, pool.layout, cuda or TorchCuda()))
        except BaseException:
            fences.close()
            raise


class _DeviceBlocks:
    """A mapped pool in device memory (a `FencedMemory`)."""

    name = "cuda_ipc"

    def __init__(self, fences: SegmentView, handle: CudaIpcHandle, layout: KVLayout, cuda: Cuda) -> None:
        if handle.num_bytes != handle.num_blocks * layout.block_bytes:
            raise NoTransportError("the handle's size is not that of its blocks")
        self._fences = fences
        self._blocks: torch.Tensor | None = cuda.map(handle).view(handle.num_blocks, layout.block_bytes)
        self._run = cuda.side_stream(self._blocks.device)

    @property
    def num_slots(self) -> int:
        return self._fences.num_slots

    @property
    def blocks(self) -> torch.Tensor:
        assert self._blocks is not None, "the mapping is closed"
        return self._blocks

    def fence(self, slot: int) -> int:
        return self._fences.fence(slot)

    def copy(self, destination: torch.Tensor, runs: Iterable[CopyRun]) -> None:
        def launch() -> None:
            for source, target, length in runs:
                destination[target : target + length].copy_(self.blocks[source : source + length], non_blocking=True)

        self._run(launch)

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        gathered: list[torch.Tensor] = []
        self._run(lambda: gathered.append(self.blocks[list(block_ids)]))
        return gathered[0]

    def close(self) -> None:
        # The last reference unmaps the memory, and tells the source's allocator so.
        self._blocks = None
        self._fences.close()


class TorchCuda:
    """CUDA by way of torch, which shares memory between processes for its own multiprocessing."""

    def share(self, storage: torch.Tensor, *, num_blocks: int, fence_segment: str) -> CudaIpcHandle:
        """See `Cuda.share`."""
        shared: tuple[Any, ...] = storage.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        _, memory, num_bytes, offset_bytes, counter, counter_offset, event, needs_sync = shared
        return CudaIpcHandle(
            device_uuid=_uuid(storage.device.index or 0),
            num_blocks=num_blocks,
            fence_segment=fence_segment,
            num_bytes=num_bytes,
            memory_handle=memory,
            offset_bytes=offset_bytes,
            ref_counter_handle=counter,
            ref_counter_offset=counter_offset,
            event_handle=event,
            needs_event_sync=needs_sync,
        )

    def map(self, handle: CudaIpcHandle) -> torch.Tensor:
        """See `Cuda.map`."""
        for index in range(torch.cuda.device_count()):
            if _uuid(index) == handle.device_uuid:
                break
        else:
            raise NoTransportError(f"the device {handle.device_uuid} is not visible to this process")
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            handle.memory_handle,
            handle.num_bytes,
            handle.offset_bytes,
            handle.ref_counter_handle,
            handle.ref_counter_offset,
            handle.event_handle,
            handle.needs_event_sync,
        )
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)

    def side_stream(self, device: torch.device) -> Callable[[Callable[[], None]], None]:
        """See `Cuda.side_stream`. Copies to another device use peer access where the two have it."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def run(job: Callable[[], None]) -> None:
            with torch.cuda.stream(stream):
                job()
                # Blocking: the thread sleeps while the copy runs. There is no time-out, because a copy that was
                # begun cannot be called back, and its destination must not be freed before it is over.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record(stream)
            event.synchronize()

        return run


def fence_table(spec: SegmentSpec) -> SegmentSpec:
    """The segment that has a pool's fence table without its blocks."""
    return SegmentSpec(layout=spec.layout, num_blocks=0, num_slots=spec.num_slots, incarnation=spec.incarnation)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
