"""What only the streamed transport owes: parts, pieces and who may ask for them."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
import torch

from baton.core.errors import InvalidArgumentError, UnauthenticatedError
from baton.engine.kv_pool import KVPool
from baton.rpc.errors import from_call
from baton.v1 import kv_transfer_pb2 as pb
from baton.v1 import kv_transfer_pb2_grpc
from kv_transfer import block_stream, grpc_reader
from kv_transfer.errors import PeerGoneError, StaleLeaseError
from kv_transfer.grpc_reader import GrpcReader
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, PEER, TIMEOUT_S, grpc_source


@pytest.fixture
def source():
    with grpc_source() as source:
        yield source


@pytest.fixture
def reader(source):
    reader = source.open_reader()
    yield reader
    reader.close()


@pytest.fixture
def into() -> KVPool:
    return KVPool(LAYOUT, NUM_BLOCKS)


@pytest.mark.parametrize("part_bytes", [100, 512, 700, 10_000])
@pytest.mark.parametrize("piece_bytes", [100, 512, 1000])
def test_any_cut_into_parts_and_pieces_gives_the_same_bytes(source, reader, into, monkeypatch, part_bytes, piece_bytes):
    """A block has 512 bytes: parts and pieces that are smaller, equal, larger and that do not divide it."""
    assert LAYOUT.block_bytes == 512
    monkeypatch.setattr(grpc_reader, "PART_BYTES", part_bytes)
    reader._max_piece_bytes = piece_bytes
    reader.read(source.grant(3, 4, 9, 0, 15), into, [8, 9, 10, 2, 0])
    assert torch.equal(into.tensor[[8, 9, 10, 2, 0]], source.pool.tensor[[3, 4, 9, 0, 15]])


def test_messages_stay_below_the_limit_of_either_side(into):
    with grpc_source(max_message_bytes=1024) as source:
        reader = source.open_reader()
        reader.read(source.grant(*range(12)), into, list(range(12)))
        assert torch.equal(into.tensor[:12], source.pool.tensor[:12])
        reader.close()


def test_a_reader_that_stands_still_holds_its_source_back(source, reader, monkeypatch):
    """Two calls of one block each are open at a time, however slowly it takes in what comes."""
    monkeypatch.setattr(grpc_reader, "PART_BYTES", LAYOUT.block_bytes)
    sent = []
    source.meanwhile(lambda: sent.append(None))
    pieces = reader._pieces(source.grant(*range(12)), 0, 12 * LAYOUT.block_bytes)
    for number, _ in enumerate(pieces, start=1):
        assert len(reader._calls) <= 2
        assert number <= len(sent) <= number + 1
    assert len(sent) == 12
    assert not reader._calls


def pull(reader: GrpcReader, **changes) -> list[pb.PullBlocksResponse]:
    request = pb.PullBlocksRequest(
        lease_id="lease",
        incarnation=PEER.incarnation,
        pair_secret=reader._pool.secret,
        num_bytes=1024,
        max_piece_bytes=100,
    )
    for name, value in changes.items():
        setattr(request, name, value)
    stub = kv_transfer_pb2_grpc.KvTransferServiceStub(reader._channel)
    try:
        return list(stub.PullBlocks(request))
    except grpc.RpcError as error:
        raise from_call(error) from None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"first_byte": 1}, "first_byte"),
        ({"first_byte": 2**63}, "first_byte"),
        ({"num_bytes": 1025}, "first_byte"),
        ({"num_bytes": 0}, "num_bytes"),
        ({"num_bytes": block_stream.MAX_PART_BYTES + 1}, "num_bytes"),
        ({"max_piece_bytes": 0}, "max_piece_bytes"),
        ({"lease_id": ""}, "lease_id"),
        ({"incarnation": ""}, "incarnation"),
    ],
)
def test_nothing_beyond_the_leases_own_blocks_can_be_asked_for(source, reader, changes, field):
    source.grant(3, 4)
    assert [len(piece.data) for piece in pull(reader)] == [100] * 10 + [24]
    with pytest.raises(InvalidArgumentError) as refusal:
        pull(reader, **changes)
    assert refusal.value.field == field


def test_the_descriptors_block_ids_open_no_other_blocks(source, reader, into):
    """Whatever a reader names, it gets its lease's."""
    descriptor = replace(source.grant(3, 4), block_ids=(7, 8))
    reader.read(descriptor, into, [0, 1])
    assert torch.equal(into.tensor[:2], source.pool.tensor[[3, 4]])


def test_another_pairs_lease_does_not_exist(source, reader, into):
    """Two handshakes, and the second one's reader has learned of the first one's lease."""
    descriptor = source.grant(1)
    reader.read(descriptor, into, [0])
    thief = source.open_reader()
    thief._pool = replace(reader._pool, secret=source.mint())
    with pytest.raises(StaleLeaseError):
        thief.read(descriptor, into, [1])
    thief._pool = replace(reader._pool, secret=b"guess")
    with pytest.raises(UnauthenticatedError):
        thief.read(descriptor, into, [1])
    assert not into.tensor[1].any()
    thief.close()


def test_a_source_that_cannot_be_reached_is_gone(source, into):
    descriptor = source.grant(1)
    pool = source.open_reader()._pool
    reader = GrpcReader(
        pool, grpc.insecure_channel("127.0.0.1:1"), from_call, max_message_bytes=4096, timeout_s=TIMEOUT_S
    )
    with pytest.raises(PeerGoneError):
        reader.read(descriptor, into, [0])
    reader.close()
