"""What every transport's reader owes. A new transport joins by one more entry in `sources.SOURCES`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from baton.core.errors import InvalidArgumentError
from baton.engine.kv_pool import KVPool
from kv_transfer import dist_link, fenced
from kv_transfer.errors import (
    ChecksumError,
    NoTransportError,
    PeerGoneError,
    PoolMismatchError,
    StaleLeaseError,
    TransferFailedError,
)
from kv_transfer.lease import LeaseOutcome
from tests.unit.kv_transfer.sources import (
    ADDRESSED,
    LAYOUT,
    NUM_BLOCKS,
    SHORT_TIMEOUT_S,
    SOURCES,
    TIMEOUT_S,
    describe,
    relaid,
)


@pytest.fixture(params=SOURCES)
def source(request):
    with SOURCES[request.param]() as source:
        yield source


@pytest.fixture(params=ADDRESSED)
def addressed(request):
    with ADDRESSED[request.param]() as source:
        yield source


@pytest.fixture
def reader(source):
    reader = source.open_reader()
    yield reader
    reader.close()


@pytest.fixture
def into() -> KVPool:
    return KVPool(LAYOUT, NUM_BLOCKS)


def by_position(pool: KVPool, block_ids, num_tokens: int) -> torch.Tensor:
    """A sequence's cache as [num_layers, 2, num_tokens, num_kv_heads, head_dim], computed from first principles."""
    rows = [
        pool.tensor[block_ids[i // pool.layout.block_size], :, :, i % pool.layout.block_size] for i in range(num_tokens)
    ]
    return torch.stack(rows, dim=2)


def test_blocks_arrive_in_order_bit_for_bit_and_nothing_else_is_touched(source, reader, into):
    result = reader.read(source.grant(3, 4, 9, 0), into, [8, 9, 10, 2])
    assert torch.equal(into.tensor[[8, 9, 10, 2]].view(torch.uint8), source.pool.tensor[[3, 4, 9, 0]].view(torch.uint8))
    assert not into.tensor[[0, 1, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15]].any()
    assert result.num_bytes == 4 * LAYOUT.block_bytes
    assert result.copy_s > 0
    assert result.transport == source.name


def test_a_lease_may_be_read_again_while_it_lives(source, reader, into):
    descriptor = source.grant(1)
    reader.read(descriptor, into, [0])
    source.pool.tensor[1] = 7.0
    reader.read(descriptor, into, [0])
    assert (into.tensor[0] == 7.0).all()


def test_many_reads_at_a_time_do_not_mix(source, reader, into):
    descriptors = [source.grant(i, NUM_BLOCKS - 1 - i, lease_id=f"lease-{i}") for i in range(8)]

    def read(i: int) -> None:
        for _ in range(5):
            reader.read(descriptors[i], into, [2 * i, 2 * i + 1])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    for i, descriptor in enumerate(descriptors):
        assert torch.equal(into.tensor[2 * i : 2 * i + 2], source.pool.tensor[list(descriptor.block_ids)])


@pytest.mark.parametrize("block_size", [1, 3, 8, 32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_of_another_size_or_type_are_converted_position_by_position(source, reader, block_size, dtype):
    layout = relaid(block_size=block_size, dtype=dtype)
    into = KVPool(layout, 24)
    descriptor = source.grant(3, 9, 4)
    block_ids = list(range(23, -1, -1))[: layout.blocks_for(descriptor.num_tokens)]
    reader.read(descriptor, into, block_ids)
    got = by_position(into, block_ids, descriptor.num_tokens)
    expected = by_position(source.pool, descriptor.block_ids, descriptor.num_tokens)
    assert torch.equal(got, expected.to(got.dtype))
    untouched = sorted(set(range(24)) - set(block_ids))
    assert not into.tensor[untouched].any()


def test_an_ended_lease_is_refused_before_anything_is_copied(source, reader, into):
    descriptor = source.grant(1)
    source.leases.release("lease", LeaseOutcome.ABANDONED)
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0])
    assert not into.tensor.any()


def test_the_next_lease_of_the_same_slot_does_not_revive_an_old_descriptor(source, reader, into):
    old = source.grant(1)
    source.leases.release("lease", LeaseOutcome.ABANDONED)
    for i in range(source.leases._fences.num_slots):
        source.leases.grant(f"next-{i}", "attempt", [1])
    with pytest.raises(StaleLeaseError):
        reader.read(old, into, [0])


def test_a_lease_that_ends_during_the_copy_is_found_out(source, reader, into):
    descriptor = source.grant(1, 2)
    source.meanwhile(lambda: source.leases.release("lease", LeaseOutcome.ABANDONED))
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0, 1])


def test_a_source_that_shut_down_is_found_out(source, reader, into):
    descriptor = source.grant(1)
    source.leases.end_all()
    source.close()
    with pytest.raises(StaleLeaseError):
        reader.read(descriptor, into, [0])


def test_a_closed_reader_says_so_and_closing_twice_is_harmless(source, reader, into):
    descriptor = source.grant(1)
    reader.close()
    reader.close()
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, [0])


def test_closing_during_a_read_ends_it(source, into, monkeypatch):
    monkeypatch.setattr(fenced, "PIECE_BYTES", LAYOUT.block_bytes)
    monkeypatch.setattr(dist_link, "PIECE_BYTES", LAYOUT.block_bytes)
    reader = source.open_reader()
    descriptor = source.grant(1, 2, 3)
    closing = threading.Thread(target=reader.close)
    pieces = []

    def close() -> None:
        """`close` arrives now, and may have to wait for this piece: the reader's memory is in use."""
        if pieces:  # a sender looks at the lease once more
            return
        pieces.append(None)
        closing.start()
        while not reader._closed:
            time.sleep(0)

    source.meanwhile(close)
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, [0, 1, 2])
    closing.join()
    assert len(pieces) == 1


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"incarnation": "life-2"}, PoolMismatchError, None),
        ({"worker_id": "prefill-2"}, PoolMismatchError, None),
        ({"block_ids": (1,)}, InvalidArgumentError, "kv.block_ids"),
        ({"generation": 0}, InvalidArgumentError, "kv.generation"),
    ],
)
def test_a_descriptor_that_does_not_belong_here_is_refused(source, reader, into, change, error, field):
    descriptor = replace(source.grant(1, 2), **change)
    with pytest.raises(error) as refusal:
        reader.read(descriptor, into, [0, 1])
    assert getattr(refusal.value, "field", None) == field
    assert not into.tensor.any()


def test_a_stalled_source_ends_the_read_within_its_time_out(source, into):
    descriptor = source.grant(1)
    reader = source.open_reader(SHORT_TIMEOUT_S) if source.needs_source else source.open_reader()
    resume = threading.Event()
    if source.needs_source:
        source.meanwhile(resume.wait)
        started_s = time.monotonic()
        try:
            with pytest.raises(TransferFailedError):
                reader.read(descriptor, into, [0])
        finally:
            resume.set()
        assert time.monotonic() - started_s < TIMEOUT_S / 2
    else:  # it takes no part: the suite's process is the source, and does nothing while the read runs
        reader.read(descriptor, into, [0])
    reader.close()


def test_damage_on_the_way_is_found_out(source, reader, into):
    if source.corrupt is None:
        pytest.skip("one memory: nothing is on the way")
    descriptor = source.grant(1)
    source.corrupt()
    with pytest.raises(ChecksumError):
        reader.read(descriptor, into, [0])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"block_ids": (1, NUM_BLOCKS)}, "kv.block_ids"),
        ({"lease_slot": 12}, "kv.lease_slot"),
    ],
)
def test_a_reader_that_addresses_memory_stays_inside_the_pool(addressed, into, change, field):
    reader = addressed.open_reader()
    with pytest.raises(InvalidArgumentError) as refusal:
        reader.read(replace(addressed.grant(1, 2), **change), into, [0, 1])
    assert refusal.value.field == field
    assert not into.tensor.any()
    reader.close()


def test_a_pool_outside_cpu_memory_is_refused(addressed):
    reader = addressed.open_reader()
    with pytest.raises(NoTransportError, match="meta"):
        reader.read(addressed.grant(1), KVPool(LAYOUT, NUM_BLOCKS, device="meta"), [0])
    reader.close()


@pytest.mark.parametrize("block_size", [4, 8, 2])
def test_a_growing_cache_is_read_in_parts(source, reader, block_size):
    """Each part is read before the next block is computed; together they are what one read would have brought."""
    layout = relaid(block_size=block_size)
    into = KVPool(layout, 24)
    block_ids = [3, 9, 4, 11, 7]
    lease = source.leases.grant("lease", "attempt", block_ids[:2], is_growing=True)
    growing = replace(describe(lease), block_ids=(), num_tokens=19, is_growing=True)
    ours = list(range(23, -1, -1))[: layout.blocks_for(19)]
    late = source.pool.tensor[block_ids[2:]].clone()
    source.pool.tensor[block_ids[2:]] = 0.0

    def read(first: int, end: int, num_tokens: int) -> None:
        start = first * LAYOUT.block_size
        part = growing.part(first, block_ids[first:end], num_tokens)
        reader.read(part, into, ours[start // block_size : -(-(start + num_tokens) // block_size)])

    read(0, 2, 8)
    source.pool.tensor[block_ids[2:]] = late
    source.leases.grow("lease", block_ids[2:4])
    read(2, 4, 8)
    source.leases.grow("lease", block_ids[4:], is_complete=True)
    read(4, 5, 3)
    assert torch.equal(by_position(into, ours, 19), by_position(source.pool, block_ids, 19))
    untouched = sorted(set(range(24)) - set(ours))
    assert not into.tensor[untouched].any()


def test_a_growing_lease_that_ends_is_found_out_at_the_next_part(source, reader, into):
    lease = source.leases.grant("lease", "attempt", [3, 9], is_growing=True)
    growing = replace(describe(lease), block_ids=(), num_tokens=16, is_growing=True)
    reader.read(growing.part(0, [3], 4), into, [0])
    source.leases.release("lease", LeaseOutcome.ABANDONED)
    with pytest.raises(StaleLeaseError):
        reader.read(growing.part(1, [9], 4), into, [1])
    assert not into.tensor[1].any()


def test_what_is_not_computed_yet_cannot_be_asked_for(source, reader, into):
    """Where the source takes part in the copy; a reader that maps the memory is told the ids of blocks, and when."""
    if not source.needs_source:
        pytest.skip("it knows no block's id before it is told")
    lease = source.leases.grant("lease", "attempt", [3], is_growing=True)
    growing = replace(describe(lease), block_ids=(), num_tokens=16, is_growing=True)
    with pytest.raises((InvalidArgumentError, StaleLeaseError)):
        reader.read(growing.part(1, [9], 4), into, [1])
    assert not into.tensor.any()
