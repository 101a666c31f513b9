"""What every transport's reader owes. A new transport joins by one more entry in `SOURCES`."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.clock import ManualClock
from baton.core.errors import InvalidArgumentError
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer import fenced
from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool
from kv_transfer.errors import NoTransportError, PeerGoneError, PoolMismatchError, StaleLeaseError
from kv_transfer.lease import Lease, LeaseOutcome, LeaseTable
from kv_transfer.memory import MemoryPool
from kv_transfer.readers import PeerReaders
from kv_transfer.shm import ShmPool, ShmReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.transport import KVReader

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
PEER = PeerKey("prefill-1", "life-1")
NUM_BLOCKS = 16


@dataclass
class Source:
    pool: KVPool
    leases: LeaseTable
    open_reader: Callable[[], KVReader]
    close: Callable[[], None]

    def grant(self, *block_ids: int) -> KVDescriptor:
        return describe(self.leases.grant("lease", "attempt", block_ids))


def describe(lease: Lease) -> KVDescriptor:
    return KVDescriptor(
        lease_id=lease.lease_id,
        lease_slot=lease.slot,
        generation=lease.generation,
        worker_id=PEER.worker_id,
        incarnation=PEER.incarnation,
        address="localhost:1",
        block_ids=lease.block_ids,
        num_tokens=len(lease.block_ids) * LAYOUT.block_size - 1,
        lease_s=5.0,
    )


def memory_source() -> Source:
    memory = MemoryPool(LAYOUT, NUM_BLOCKS, peer=PEER, num_slots=4)
    return _source(memory, memory.open_reader)


def shm_source() -> Source:
    shm = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=4)
    return _source(shm, lambda: ShmReader.open(PeerPool(peer=PEER, handle=shm.handle), LAYOUT))


def _source(transport: MemoryPool | ShmPool, open_reader: Callable[[], KVReader]) -> Source:
    pool = KVPool(LAYOUT, NUM_BLOCKS, storage=transport.storage)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    leases = LeaseTable(transport.fences, ManualClock(), lease_s=5.0)
    return Source(pool, leases, open_reader, transport.close)


SOURCES = {"memory": memory_source, "shm": shm_source}


@pytest.fixture(params=SOURCES)
def source(request):
    source = SOURCES[request.param]()
    yield source
    source.close()


@pytest.fixture
def reader(source):
    reader = source.open_reader()
    yield reader
    reader.close()


@pytest.fixture
def into() -> KVPool:
    return KVPool(LAYOUT, NUM_BLOCKS)


def test_blocks_arrive_in_order_bit_for_bit_and_nothing_else_is_touched(source, reader, into):
    result = reader.read(source.grant(3, 4, 9, 0), into, [8, 9, 10, 2])
    assert torch.equal(into.tensor[[8, 9, 10, 2]].view(torch.uint8), source.pool.tensor[[3, 4, 9, 0]].view(torch.uint8))
    assert not into.tensor[[0, 1, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15]].any()
    assert result.num_bytes == 4 * LAYOUT.block_bytes
    assert result.copy_s > 0


def test_a_lease_may_be_read_again_while_it_lives(source, reader, into):
    descriptor = source.grant(1)
    reader.read(descriptor, into, [0])
    source.pool.tensor[1] = 7.0
    reader.read(descriptor, into, [0])
    assert (into.tensor[0] == 7.0).all()


def test_an_ended_lease_is_refused_before_anything_is_copied(source, reader, into):
    descriptor = source.grant(1)
    source.leases.release("lease", LeaseOutcome.ABANDONED)
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0])
    assert not into.tensor.any()


def test_the_next_lease_of_the_same_slot_does_not_revive_an_old_descriptor(source, reader, into):
    old = source.grant(1)
    source.leases.release("lease", LeaseOutcome.ABANDONED)
    for i in range(4):
        source.leases.grant(f"next-{i}", "attempt", [1])
    with pytest.raises(StaleLeaseError):
        reader.read(old, into, [0])


def test_a_lease_that_ends_during_the_copy_is_found_out(source, reader, into, monkeypatch):
    descriptor = source.grant(1, 2)
    copy = fenced._copy

    def copy_then_end(*arguments):
        copy(*arguments)
        source.leases.release("lease", LeaseOutcome.ABANDONED)

    monkeypatch.setattr(fenced, "_copy", copy_then_end)
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0, 1])


def test_a_source_that_shut_down_is_found_out(source, reader, into):
    descriptor = source.grant(1)
    source.close()
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0])


def test_a_closed_reader_says_so_and_closing_twice_is_harmless(source, reader, into):
    descriptor = source.grant(1)
    reader.close()
    reader.close()
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, [0])


def test_closing_during_a_read_ends_it_at_the_next_piece(source, into, monkeypatch):
    monkeypatch.setattr(fenced, "PIECE_BYTES", LAYOUT.block_bytes)
    reader = source.open_reader()
    descriptor = source.grant(1, 2, 3)
    closing = threading.Thread(target=reader.close)
    copies = []

    def copy_while_closing(*arguments):
        """`close` arrives now, and has to wait for this piece: the reader's memory is in use."""
        copies.append(arguments)
        closing.start()
        while not reader._closed:
            time.sleep(0)

    monkeypatch.setattr(fenced, "_copy", copy_while_closing)
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, [0, 1, 2])
    closing.join()
    assert len(copies) == 1


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"incarnation": "life-2"}, PoolMismatchError, None),
        ({"worker_id": "prefill-2"}, PoolMismatchError, None),
        ({"block_ids": (1, NUM_BLOCKS)}, InvalidArgumentError, "kv.block_ids"),
        ({"block_ids": (1,)}, InvalidArgumentError, "kv.block_ids"),
        ({"lease_slot": 4}, InvalidArgumentError, "kv.lease_slot"),
        ({"lease_slot": 3, "generation": 0}, InvalidArgumentError, "kv.generation"),
    ],
)
def test_a_descriptor_that_does_not_belong_here_is_refused(source, reader, into, change, error, field):
    descriptor = replace(source.grant(1, 2), **change)
    with pytest.raises(error) as refusal:
        reader.read(descriptor, into, list(range(len(descriptor.block_ids))))
    assert getattr(refusal.value, "field", None) == field
    assert not into.tensor.any()


def test_a_pool_outside_cpu_memory_is_refused(source, reader):
    with pytest.raises(NoTransportError, match="meta"):
        reader.read(source.grant(1), KVPool(LAYOUT, NUM_BLOCKS, device="meta"), [0])


def test_readers_are_opened_once_a_peer_and_closed_when_it_dies(source, into):
    opened = []

    def open_reader(pool):
        opened.append(pool)
        return source.open_reader()

    readers = PeerReaders(open_reader)
    descriptor = source.grant(1)
    with pytest.raises(PeerGoneError):
        readers.read(descriptor, into, [0])
    pool = PeerPool(peer=PEER, handle=None)
    readers.open(pool)
    readers.open(pool)
    assert opened == [pool]
    readers.read(descriptor, into, [0])
    readers.close(PEER)
    readers.close(PEER)
    with pytest.raises(PeerGoneError):
        readers.read(descriptor, into, [0])
    readers.open(pool)
    readers.close_all()
    assert len(opened) == 2
