"""A pair that has not spoken for long, and a reader that falls silent: what the source gives up."""

from __future__ import annotations

import threading

import torch

from baton.engine.kv_pool import KVPool
from kv_transfer import dist_session, dist_source
from kv_transfer.dist_session import DistSession
from kv_transfer.dist_source import DistSource
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, SHORT_TIMEOUT_S, TIMEOUT_S, gloo_source


def test_a_read_after_a_long_silence_makes_a_new_communicator(monkeypatch):
    monkeypatch.setattr(dist_source, "SOURCE_IDLE_S", 0.1)
    with gloo_source() as source:
        reader, into = source.open_reader(), KVPool(LAYOUT, NUM_BLOCKS)
        descriptor = source.grant(3, 4)
        reader.read(descriptor, into, [0, 1])
        for thread in threading.enumerate():
            if thread.name == "handover-sender":
                thread.join(60)
                assert not thread.is_alive()
        monkeypatch.setattr(dist_session, "READER_IDLE_S", 0.0)
        reader.read(descriptor, into, [5, 6])
        assert torch.equal(into.tensor[[5, 6]], source.pool.tensor[[3, 4]])
        reader.close()


def test_what_a_reader_does_not_fetch_is_removed_when_its_read_has_failed(monkeypatch):
    said, is_over = [], threading.Event()
    reply, forget_replies = DistSource.reply, DistSource.forget_replies

    def note_reply(self, call, stage, **words):
        reply(self, call, stage, **words)
        said.append(stage)

    def note_end(self, call):
        forget_replies(self, call)
        is_over.set()

    monkeypatch.setattr(DistSource, "reply", note_reply)
    monkeypatch.setattr(DistSource, "forget_replies", note_end)
    with gloo_source(timeout_s=SHORT_TIMEOUT_S) as source:
        reader = source.open_reader()
        session = DistSession(reader._handle, reader._pool.secret, TIMEOUT_S)
        call = session.call(source.grant(3, 4).lease_id, ((0, 2),))
        # The source waits for this side of the communicator, in vain.
        assert is_over.wait(TIMEOUT_S)
        assert said == ["go"]
        assert not session.has_answer(call, "go")
        session.end()
        reader.close()
