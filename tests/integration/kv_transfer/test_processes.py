"""A source that is a process of its own, and dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool, ShmHandle
from kv_transfer.errors import PeerGoneError, StaleLeaseError
from kv_transfer.readers import PeerReaders
from kv_transfer.segment import SHM_DIRECTORY, reap_stale_segments
from kv_transfer.shm import ShmPool, ShmReader

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 32
PEER = PeerKey("prefill-1", "life-1")
BLOCK_IDS = (3, 4, 5, 20)
SOURCE_SCRIPT = Path(__file__).with_name("source_process.py")


def pattern() -> torch.Tensor:
    """What the source wrote before it granted the lease; made here independently."""
    shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@dataclass
class Source:
    """A running source, its pool, and the lease that it granted."""

    process: subprocess.Popen[str]
    pool: PeerPool
    descriptor: KVDescriptor

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def release_and_reuse(self) -> None:
        self.tell("release and reuse")
        assert self.process.stdout.readline() == "done\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    @property
    def handle(self) -> ShmHandle:
        (handle,) = self.pool.handles
        return handle

    @property
    def path(self) -> Path:
        return SHM_DIRECTORY / self.handle.segment


@pytest.fixture
def source():
    with subprocess.Popen(
        [sys.executable, str(SOURCE_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            order = {"layout": asdict(LAYOUT), "num_blocks": NUM_BLOCKS, "incarnation": PEER.incarnation}
            process.stdin.write(json.dumps({**order, "block_ids": BLOCK_IDS}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            descriptor = KVDescriptor(
                lease_id=answer["lease"]["lease_id"],
                lease_slot=answer["lease"]["slot"],
                generation=answer["lease"]["generation"],
                worker_id=PEER.worker_id,
                incarnation=PEER.incarnation,
                address="",
                block_ids=tuple(answer["lease"]["block_ids"]),
                num_tokens=60,
                lease_s=5.0,
            )
            handle = ShmHandle(segment=answer["segment"], num_blocks=NUM_BLOCKS)
            pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=(handle,))
            yield Source(process, pool, descriptor)
        finally:
            process.kill()
    reap_stale_segments()


def mappings(segment: str) -> list[str]:
    """This process's mappings of a segment, as the kernel lists them."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if segment in line]


def test_the_bytes_arrive_from_another_process_through_a_read_only_mapping(source):
    into = KVPool(LAYOUT, NUM_BLOCKS)
    reader = ShmReader.open(source.pool, source.handle)
    assert all(" r--s " in line for line in mappings(source.handle.segment))
    reader.read(source.descriptor, into, [0, 1, 2, 9])
    expected = pattern()[list(BLOCK_IDS)]
    assert torch.equal(into.tensor[[0, 1, 2, 9]].view(torch.uint8), expected.view(torch.uint8))
    source.release_and_reuse()
    with pytest.raises(StaleLeaseError):
        reader.read(source.descriptor, into, [0, 1, 2, 9])
    reader.close()
    assert mappings(source.handle.segment) == []


def test_a_killed_source_leaves_a_readable_pool_that_is_reaped_and_unmapped(source):
    readers = PeerReaders(ShmReader.open)
    readers.open(source.pool)
    reap_stale_segments()
    assert source.path.exists(), "its owner lives"
    source.kill()

    # Nobody can write the blocks any more: what the lease promised still holds.
    into = KVPool(LAYOUT, NUM_BLOCKS)
    readers.read(source.descriptor, into, [7, 8, 9, 10])
    assert torch.equal(into.tensor[7:11], pattern()[list(BLOCK_IDS)])

    reap_stale_segments()
    assert not source.path.exists()
    assert len(mappings(source.handle.segment)) == 1, "unlinked, and still mapped by us"
    readers.close(PEER)
    assert mappings(source.handle.segment) == []
    with pytest.raises(PeerGoneError):
        readers.read(source.descriptor, into, [7, 8, 9, 10])
    with pytest.raises(PeerGoneError):
        readers.open(source.pool)


def test_a_failed_read_keeps_no_view_of_the_mapping(source):
    reader = ShmReader.open(source.pool, source.handle)
    source.release_and_reuse()
    with pytest.raises(StaleLeaseError) as failure:
        reader.read(source.descriptor, KVPool(LAYOUT, NUM_BLOCKS), [0, 1, 2, 3])
    reader.close()
    assert failure.value.__traceback__ is not None, "whoever logs the error later still holds its frames"
    assert mappings(source.handle.segment) == []


def test_a_new_source_reaps_its_killed_predecessor_first(source):
    source.kill()
    successor = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation="life-2", num_slots=8)
    assert not source.path.exists()
    successor.close()


def test_a_source_that_stops_in_order_leaves_no_segment(source):
    source.tell("stop")
    assert source.process.wait() == 0
    assert not source.path.exists()
