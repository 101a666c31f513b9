"""A pair that has not spoken for long: the source gives its communicator up, and the reader does not call for it."""

from __future__ import annotations

import threading

import torch

from baton.engine.kv_pool import KVPool
from kv_transfer import dist_session, dist_source
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, gloo_source


def test_a_read_after_a_long_silence_makes_a_new_communicator(monkeypatch):
    monkeypatch.setattr(dist_source, "SOURCE_IDLE_S", 0.1)
    with gloo_source() as source:
        reader, into = source.open_reader(), KVPool(LAYOUT, NUM_BLOCKS)
        descriptor = source.grant(3, 4)
        reader.read(descriptor, into, [0, 1])
        for thread in threading.enumerate():
            if thread.name == "handover-sender":
                thread.join(10)
                assert not thread.is_alive()
        monkeypatch.setattr(dist_session, "READER_IDLE_S", 0.0)
        reader.read(descriptor, into, [5, 6])
        assert torch.equal(into.tensor[[5, 6]], source.pool.tensor[[3, 4]])
        reader.close()
