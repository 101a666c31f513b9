"""The project's own copy: the same bytes as the C library's, wherever they begin and end, and no byte beside them."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from baton.core.clock import ManualClock
from baton.engine.kv_pool import KVPool
from baton.engine.native.build import build, compiler
from baton.engine.native.move import NativeMove
from kv_transfer.descriptor import PeerPool
from kv_transfer.lease import LeaseTable
from kv_transfer.shm import ShmPool, ShmReader
from kv_transfer.swap import SwapSpace
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, PEER, describe

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@pytest.fixture(scope="module")
def move() -> NativeMove:
    library = build()
    assert library is not None
    return NativeMove(library)


@given(st.integers(0, 130), st.integers(0, 130), st.integers(0, 400))
def test_any_stretch_arrives_and_nothing_else_is_touched(move, source_at, target_at, num_bytes):
    source = bytes((7 * index + 1) % 251 for index in range(600))
    target = ctypes.create_string_buffer(b"\xff" * 600, 600)
    kept = ctypes.create_string_buffer(source, 600)
    move(ctypes.addressof(target) + target_at, ctypes.addressof(kept) + source_at, num_bytes)
    expected = bytearray(b"\xff" * 600)
    expected[target_at : target_at + num_bytes] = source[source_at : source_at + num_bytes]
    assert target.raw == bytes(expected)


def test_a_reader_and_a_swap_copy_by_it(move):
    calls = []

    def counted(to: int, source: int, num_bytes: int) -> None:
        calls.append(num_bytes)
        move(to, source, num_bytes)

    source = ShmPool.create(LAYOUT, NUM_BLOCKS, incarnation=PEER.incarnation, num_slots=2)
    try:
        blocks = KVPool(LAYOUT, NUM_BLOCKS, storage=source.storage).tensor
        blocks.copy_(torch.randn(blocks.shape))
        leases = LeaseTable(source.fences, ManualClock(), lease_s=5.0)
        pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=b"", handles=(source.handle,))
        reader, into = ShmReader.open(pool, source.handle, counted), KVPool(LAYOUT, NUM_BLOCKS)
        reader.read(describe(leases.grant("lease", "a", [3, 4, 9])), into, [8, 9, 2])
        assert torch.equal(into.tensor[[8, 9, 2]], blocks[[3, 4, 9]])
        reader.close()
        space = SwapSpace(into, 2, counted)
        space.save([8, 2], [0, 1])
        space.restore([0, 1], [5, 6])
        assert torch.equal(into.tensor[[5, 6]], blocks[[3, 9]])
    finally:
        source.close()
    assert [num_bytes // LAYOUT.block_bytes for num_bytes in calls] == [2, 1, 1, 1, 2]
