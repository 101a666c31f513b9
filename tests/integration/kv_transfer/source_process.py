"""A prefill engine's share of a handover, as a process that tests may kill. Speaks JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys

import torch

from baton.core.clock import SystemClock
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.lease import LeaseOutcome, LeaseTable
from kv_transfer.shm import ShmPool


def pattern(layout: KVLayout, num_blocks: int, seed: int) -> torch.Tensor:
    """Contents that source and reader make independently."""
    shape = (num_blocks, layout.num_layers, 2, layout.block_size, layout.num_kv_heads, layout.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def main() -> None:
    """Grants one lease, then does as it is told until it is killed or told to stop."""
    order = json.loads(sys.stdin.readline())
    layout, num_blocks = KVLayout(**order["layout"]), order["num_blocks"]
    shm = ShmPool.create(layout, num_blocks, incarnation=order["incarnation"], num_slots=8)
    pool = KVPool(layout, num_blocks, storage=shm.storage)
    pool.tensor.copy_(pattern(layout, num_blocks, 1))
    leases = LeaseTable(shm.fences, SystemClock(), lease_s=5.0)
    lease = leases.grant("lease", "attempt", order["block_ids"])
    print(json.dumps({"segment": shm.handle.segment, "lease": dataclasses.asdict(lease)}), flush=True)
    while (command := sys.stdin.readline().strip()) == "release and reuse":
        leases.release("lease", LeaseOutcome.ABANDONED)
        pool.tensor.copy_(pattern(layout, num_blocks, 2))
        print("done", flush=True)
    assert command == "stop", command
    shm.close()


if __name__ == "__main__":
    main()
