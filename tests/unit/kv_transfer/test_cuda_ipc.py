"""The transport's own logic on a stand-in for CUDA that lies in CPU memory. tests/gpu has the real thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.clock import ManualClock
from baton.core.errors import StartupError
from baton.engine.block_moves import Way
from baton.engine.host_copy import HostCopy
from baton.engine.kv_pool import KVPool
from kv_transfer import fenced
from kv_transfer.cuda_ipc import CudaIpcPool, CudaIpcReader
from kv_transfer.descriptor import CudaIpcHandle, PeerPool
from kv_transfer.errors import NoTransportError, PeerGoneError, PoolMismatchError, StaleLeaseError
from kv_transfer.lease import LeaseOutcome, LeaseTable
from kv_transfer.segment import SHM_DIRECTORY, SegmentSpec
from kv_transfer.shm import ShmPool, ShmReader
from kv_transfer.source import SourcePool
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, PEER, describe, relaid

SPEC = SegmentSpec(layout=LAYOUT, num_blocks=NUM_BLOCKS, num_slots=4, incarnation=PEER.incarnation)


class FakeCuda:
    """Handles are numbers of tensors; a stream runs its jobs at once, and writes down that it was waited for."""

    def __init__(self) -> None:
        self.shared: dict[bytes, torch.Tensor] = {}
        self.num_waits = 0
        self.during = lambda: None
        self.can_share = True

    def share(self, storage, *, num_blocks, fence_segment):
        if not self.can_share:
            raise RuntimeError("expandable segments\nand more lines")
        name = b"%d" % len(self.shared)
        self.shared[name] = storage
        return CudaIpcHandle(
            device_uuid="gpu",
            num_blocks=num_blocks,
            fence_segment=fence_segment,
            num_bytes=storage.numel(),
            memory_handle=name,
            offset_bytes=0,
            ref_counter_handle=b"",
            ref_counter_offset=0,
            event_handle=b"",
            needs_event_sync=False,
        )

    def map(self, handle):
        if handle.device_uuid != "gpu":
            raise NoTransportError("not visible")
        return self.shared[handle.memory_handle]

    def side_stream(self, device):
        def run(job):
            job()
            self.during()
            self.num_waits += 1

        return run


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def source(cuda):
    source = CudaIpcPool.create(SPEC, "cpu", cuda)
    pool = KVPool(LAYOUT, NUM_BLOCKS, storage=source.storage)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    source.pool, source.leases = pool, LeaseTable(source.fences, ManualClock(), lease_s=5.0)
    yield source
    source.close()


def open_reader(source, cuda, **changes) -> CudaIpcReader:
    handle = replace(source.handle, **changes)
    return CudaIpcReader.open(
        PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=(handle,)), handle, cuda
    )


def test_blocks_go_from_pool_to_pool_on_the_side_stream_in_pieces(source, cuda, monkeypatch):
    monkeypatch.setattr(fenced, "PIECE_BYTES", 2 * LAYOUT.block_bytes)
    reader, into = open_reader(source, cuda), KVPool(LAYOUT, NUM_BLOCKS)
    result = reader.read(describe(source.leases.grant("lease", "a", [3, 4, 9, 0])), into, [8, 9, 2, 1])
    assert torch.equal(into.tensor[[8, 9, 2, 1]], source.pool.tensor[[3, 4, 9, 0]])
    assert (result.transport, cuda.num_waits) == ("cuda_ipc", 2)
    reader.close()


def test_a_growing_cache_is_read_in_parts(source, cuda):
    """Nothing of a part is the device's: it is a lease like others, whose blocks a step's end made known."""
    reader, into = open_reader(source, cuda), KVPool(LAYOUT, NUM_BLOCKS)
    growing = describe(source.leases.grant("lease", "a", [3, 4], is_growing=True))
    reader.read(growing.part(0, [3, 4], 2 * LAYOUT.block_size), into, [8, 9])
    source.leases.grow("lease", [0], is_complete=True)
    reader.read(growing.part(2, [0], LAYOUT.block_size), into, [1])
    assert torch.equal(into.tensor[[8, 9, 1]], source.pool.tensor[[3, 4, 0]])
    source.leases.release("lease", LeaseOutcome.CONSUMED)
    with pytest.raises(StaleLeaseError):
        reader.read(growing.part(2, [0], LAYOUT.block_size), into, [1])
    reader.close()


def test_blocks_of_another_size_are_gathered_and_converted(source, cuda):
    layout = relaid(block_size=8)
    reader, into = open_reader(source, cuda), KVPool(layout, 4)
    descriptor = describe(source.leases.grant("lease", "a", [3, 9]))
    reader.read(descriptor, into, [1])
    got = into.tensor[1][:, :, : descriptor.num_tokens]
    expected = torch.cat([source.pool.tensor[3], source.pool.tensor[9]], dim=2)[:, :, : descriptor.num_tokens]
    assert torch.equal(got, expected)
    reader.close()


def test_a_lease_that_ends_while_the_copy_is_under_way_is_found_out_when_it_is_over(source, cuda):
    reader = open_reader(source, cuda)
    descriptor = describe(source.leases.grant("lease", "a", [3]))
    cuda.during = lambda: source.leases.release("lease", LeaseOutcome.EXPIRED)
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, KVPool(LAYOUT, NUM_BLOCKS), [0])
    reader.close()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"device_uuid": "elsewhere"}, NoTransportError),
        ({"num_blocks": NUM_BLOCKS + 1}, NoTransportError),
        ({"fence_segment": "baton-" + "0" * 32}, PeerGoneError),
        ({"fence_segment": "../x"}, PoolMismatchError),
    ],
)
def test_a_handle_that_does_not_fit_is_refused(source, cuda, changes, error):
    with pytest.raises(error):
        open_reader(source, cuda, **changes)


def test_the_fence_table_is_a_small_segment_that_goes_with_the_pool(source):
    path = SHM_DIRECTORY / source.handle.fence_segment
    assert path.stat().st_size <= 3 * 4096
    source.close()
    source.close()
    assert not path.exists()


def test_a_pool_that_cannot_be_shared_is_one_that_others_cannot_reach_this_way(cuda, caplog):
    cuda.can_share = False
    source = CudaIpcPool.create(SPEC, "cpu", cuda)
    assert source.handle is None
    assert "expandable segments" in caplog.text
    assert "and more lines" not in caplog.text
    source.close()


def test_too_large_a_pool_is_refused_in_one_line(cuda):
    with pytest.raises(StartupError, match="kv_cache_bytes") as refusal:
        CudaIpcPool.create(replace(SPEC, num_blocks=2**45), "cpu", cuda)
    assert "\n" not in str(refusal.value)


def test_a_pool_with_a_host_copy_is_read_from_either_and_its_leases_end_in_both(cuda):
    host = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=4)
    source = SourcePool(SPEC, device=CudaIpcPool.create(SPEC, "cpu", cuda), host=host)
    pool, copy = (KVPool(LAYOUT, NUM_BLOCKS, storage=storage) for storage in (source.storage, source.host_copy))
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    HostCopy(pool, copy).move(Way.OUT, [3, 4, 9], [3, 4, 9])
    leases = LeaseTable(source.fences, ManualClock(), lease_s=5.0)
    kv = describe(leases.grant("lease", "a", [3, 4, 9]))
    device_handle, host_handle = source.handles
    peer_pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=source.handles)
    readers = [CudaIpcReader.open(peer_pool, device_handle, cuda), ShmReader.open(peer_pool, host_handle)]
    for reader in readers:
        into = KVPool(LAYOUT, NUM_BLOCKS)
        reader.read(kv, into, [0, 1, 2])
        assert torch.equal(into.tensor[:3], pool.tensor[[3, 4, 9]])
    assert not copy.tensor[[0, 1, 2, 5, 6, 7, 8]].any()
    leases.release("lease", LeaseOutcome.CONSUMED)
    for reader in readers:
        with pytest.raises(StaleLeaseError):
            reader.read(kv, into, [0, 1, 2])
        reader.close()
    source.close()
    source.close()
    assert not any((SHM_DIRECTORY / name).exists() for name in (device_handle.fence_segment, host_handle.segment))
