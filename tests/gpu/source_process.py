"""A prefill engine's share of a handover from device memory, as a process of its own. Speaks JSON lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from baton.core.clock import SystemClock
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.descriptor import PeerKey, Transport
from kv_transfer.lease import LeaseOutcome, LeaseTable
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.segment import SegmentSpec
from kv_transfer.source import DistPlace, SourcePool

LAYOUT = KVLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 1024
PEER = PeerKey("prefill-1", "life-1")
BLOCK_IDS = (*range(100, 600), 3, 7, 5)
NUM_FIRST = 300
"""So many of them a second lease, which grows, has at first."""


def pattern() -> torch.Tensor:
    """What the source writes; made on the CPU by both sides."""
    shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def main(device: str) -> None:
    """Grants two leases, ends or grows them when told, and stops when its standard input ends."""
    spec = SegmentSpec(layout=LAYOUT, num_blocks=NUM_BLOCKS, num_slots=4, incarnation=PEER.incarnation)
    source = SourcePool.create(spec, device)
    pool = KVPool(LAYOUT, NUM_BLOCKS, storage=source.storage)
    pool.tensor.copy_(pattern())
    torch.cuda.synchronize()
    leases = LeaseTable(source.fences, SystemClock(), lease_s=60.0)
    lease = leases.grant("lease", "attempt", BLOCK_IDS)
    growing = leases.grant("growing", "attempt", BLOCK_IDS[:NUM_FIRST], is_growing=True)
    secrets = PairSecrets(new_key())
    place = DistPlace(host="127.0.0.1", advertised_host="127.0.0.1", timeout_s=20.0)
    source.start_senders([Transport.NCCL], leases, secrets, place)
    handles = []
    for handle in source.handles:
        words = {k: v.hex() if isinstance(v, bytes) else v for k, v in asdict(handle).items() if k != "transport"}
        handles.append({"transport": handle.transport.value, **words})
    found = {
        "handles": handles,
        "secret": secrets.mint().hex(),
        "leases": {one.lease_id: {"slot": one.slot, "generation": one.generation} for one in (lease, growing)},
    }
    print(json.dumps(found), flush=True)
    while words := sys.stdin.readline().split():
        if words[0] == "grow":
            leases.grow("growing", BLOCK_IDS[NUM_FIRST:], is_complete=True)
        else:
            leases.release(words[1], LeaseOutcome.ABANDONED)
        print("done", flush=True)
    source.close()


if __name__ == "__main__":
    main(sys.argv[1])
