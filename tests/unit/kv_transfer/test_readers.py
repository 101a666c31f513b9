"""One reader a peer, the next way when one does not work, and nothing left when a peer dies."""

from __future__ import annotations

import logging

import pytest

from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.descriptor import GrpcHandle, KVDescriptor, PeerKey, PeerPool, ShmHandle
from kv_transfer.errors import NoTransportError, PeerGoneError, StaleLeaseError, TransferFailedError
from kv_transfer.readers import PeerReaders
from kv_transfer.transport import ReadResult

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32")
PEER = PeerKey("p", "life-1")
SHM, GRPC = ShmHandle(segment="baton-x", num_blocks=4), GrpcHandle()
POOL = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=(SHM, GRPC))
DESCRIPTOR = KVDescriptor(
    lease_id="lease",
    lease_slot=0,
    generation=1,
    worker_id="p",
    incarnation="life-1",
    address="",
    block_ids=(0,),
    num_tokens=1,
    lease_s=5.0,
)


class Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.failure: Exception | None = None
        self.closed = 0

    def read(self, descriptor, into, block_ids):
        if self.failure is not None:
            raise self.failure
        return ReadResult(transport=self.name, num_bytes=1, copy_s=0.0)

    def close(self):
        self.closed += 1


class Ways:
    def __init__(self, **failures: Exception) -> None:
        self.failures = failures
        self.readers: dict[str, Reader] = {}

    def __call__(self, pool, handle):
        name = handle.transport.value
        if name in self.failures:
            raise self.failures[name]
        self.readers[name] = Reader(name)
        return self.readers[name]


@pytest.fixture
def into() -> KVPool:
    return KVPool(LAYOUT, 1)


def read(readers: PeerReaders, into: KVPool) -> str:
    return readers.read(DESCRIPTOR, into, [0]).transport


def test_the_first_way_is_opened_once_and_closed_with_its_peer(into):
    ways = Ways()
    readers = PeerReaders(ways)
    with pytest.raises(PeerGoneError):
        read(readers, into)
    readers.open(POOL)
    shm = ways.readers["shm"]
    readers.open(POOL)
    assert ways.readers == {"shm": shm}
    assert read(readers, into) == "shm"
    readers.close(PEER)
    readers.close(PEER)
    assert shm.closed
    with pytest.raises(PeerGoneError):
        read(readers, into)
    readers.open(POOL)
    readers.close_all()
    assert ways.readers["shm"].closed


def test_a_way_that_does_not_open_is_passed_over_with_a_warning(into, caplog):
    readers = PeerReaders(Ways(shm=NoTransportError("another user's")))
    with caplog.at_level(logging.WARNING):
        readers.open(POOL)
    assert read(readers, into) == "grpc"
    assert "shm" in caplog.text
    assert "over grpc from now on: another user's" in caplog.text


def test_when_no_way_opens_the_last_reason_is_told():
    readers = PeerReaders(Ways(shm=NoTransportError("one"), grpc=PeerGoneError("two")))
    with pytest.raises(PeerGoneError, match="two"):
        readers.open(POOL)


def test_a_way_that_breaks_during_a_read_is_left_for_the_next_and_the_read_is_made_again(into, caplog):
    ways = Ways()
    readers = PeerReaders(ways)
    readers.open(POOL)
    ways.readers["shm"].failure = TransferFailedError("it broke")
    with caplog.at_level(logging.WARNING):
        assert read(readers, into) == "grpc"
    assert "it broke" in caplog.text
    assert ways.readers["shm"].closed
    ways.readers["grpc"].failure = TransferFailedError("this too")
    with pytest.raises(TransferFailedError, match="this too"):
        read(readers, into)


@pytest.mark.parametrize("failure", [StaleLeaseError("ended"), PeerGoneError("dead")])
def test_what_is_no_fault_of_the_way_changes_nothing(into, failure):
    ways = Ways()
    readers = PeerReaders(ways)
    readers.open(POOL)
    ways.readers["shm"].failure = failure
    with pytest.raises(type(failure)):
        read(readers, into)
    assert list(ways.readers) == ["shm"]
