from __future__ import annotations

import socket

import pytest

from baton.core.clock import ManualClock
from baton.core.settings import ServerSettings
from kv_transfer.descriptor import Transport
from kv_transfer.lease import LeaseTable
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.segment import SHM_DIRECTORY, SegmentSpec
from kv_transfer.source import DistPlace, SourcePool
from tests.unit.kv_transfer.sources import LAYOUT, NUM_BLOCKS, PEER

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "advertise_host", "place"),
    [
        ("127.0.0.1", None, ("127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", "node-7", ("127.0.0.1", "node-7")),
        ("0.0.0.0", None, (HERE, HERE)),
        ("::", "node-7", (HERE, "node-7")),
    ],
)
def test_senders_listen_where_the_worker_does(host, advertise_host, place):
    found = DistPlace.beside(ServerSettings(host=host, advertise_host=advertise_host), 1.0)
    assert (found.host, found.advertised_host) == place


@pytest.mark.parametrize(
    ("enabled", "names"),
    [
        ([Transport.SHM, Transport.GRPC], ["shm"]),
        ([Transport.GLOO, Transport.NCCL], ["shm", "gloo"]),
    ],
)
def test_ports_are_opened_only_for_what_is_enabled_and_all_ends_with_the_pool(enabled, names):
    spec = SegmentSpec(layout=LAYOUT, num_blocks=NUM_BLOCKS, num_slots=4, incarnation=PEER.incarnation)
    pool = SourcePool.create(spec, "cpu")
    leases = LeaseTable(pool.fences, ManualClock(), lease_s=5.0)
    place = DistPlace(host="127.0.0.1", advertised_host="127.0.0.1", timeout_s=1.0)
    pool.start_senders(enabled, leases, PairSecrets(new_key()), place)
    assert [handle.transport.value for handle in pool.handles] == names
    segment = pool.handles[0].segment
    pool.close()
    pool.close()
    assert not (SHM_DIRECTORY / segment).exists()
