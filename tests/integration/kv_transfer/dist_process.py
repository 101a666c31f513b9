"""One side of a handover over torch.distributed, as a process that tests may kill. Speaks JSON lines."""

from __future__ import annotations

import hashlib
import json
import sys
import time

import torch

from baton.core.clock import SystemClock
from baton.core.errors import ServingError
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.descriptor import DistHandle, KVDescriptor, PeerKey, PeerPool, Transport
from kv_transfer.destination import flat_blocks
from kv_transfer.dist_reader import DistReader
from kv_transfer.dist_source import DistSource
from kv_transfer.lease import LeaseTable
from kv_transfer.memory import MemoryPool
from kv_transfer.pairs import PairSecrets, new_key
from kv_transfer.source import DistPlace

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 512
PEER = PeerKey("prefill-1", "life-1")
LEASED = (*range(5, 400), 2, 450)


def tell(**words: object) -> None:
    print(json.dumps(words), flush=True)


def digest(blocks: torch.Tensor) -> str:
    return hashlib.sha256(bytes(flat_blocks(blocks.contiguous()).view(-1).tolist())).hexdigest()


def source(host: str, timeout_s: float) -> None:
    """Grants one lease, then sends to whoever may have it until its standard input ends."""
    memory = MemoryPool(LAYOUT, NUM_BLOCKS, peer=PEER, num_slots=4)
    pool = KVPool(LAYOUT, NUM_BLOCKS, storage=memory.storage)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=torch.Generator().manual_seed(1)))
    leases = LeaseTable(memory, SystemClock(), lease_s=60.0)
    lease = leases.grant("lease", "attempt", LEASED)
    secrets = PairSecrets(new_key())
    place = DistPlace(host=host, advertised_host=host, timeout_s=timeout_s)
    dist = DistSource(Transport.GLOO, flat_blocks(pool.tensor), leases.find, secrets, place)
    tell(host=dist.handle.host, port=dist.handle.port, secret=secrets.mint().hex(), slot=lease.slot)
    sys.stdin.readline()
    dist.close()
    tell(sha256=digest(pool.tensor[list(LEASED)]))


def reader(found: dict[str, object], timeout_s: float) -> None:
    """Reads at each line of its standard input and tells what it got."""
    handle = DistHandle(host=found["host"], port=found["port"], transport=Transport.GLOO)
    pool = PeerPool(peer=PEER, layout=LAYOUT, address="", secret=bytes.fromhex(found["secret"]), handles=(handle,))
    descriptor = KVDescriptor(
        lease_id="lease",
        lease_slot=0,
        generation=1,
        worker_id=PEER.worker_id,
        incarnation=PEER.incarnation,
        address="",
        block_ids=LEASED,
        num_tokens=len(LEASED) * LAYOUT.block_size,
        lease_s=60.0,
    )
    into = KVPool(LAYOUT, NUM_BLOCKS)
    block_ids = list(range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - len(LEASED), -1))
    dist = DistReader(pool, handle, timeout_s=timeout_s)
    tell(ready=True)
    while sys.stdin.readline().strip() == "read":
        started_s = time.monotonic()
        try:
            result = dist.read(descriptor, into, block_ids)
        except ServingError as error:
            tell(error=error.reason, after_s=time.monotonic() - started_s)
        else:
            tell(sha256=digest(into.tensor[block_ids]), num_bytes=result.num_bytes)
    dist.close()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        source(sys.argv[2], float(sys.argv[3]))
    else:
        reader(json.loads(sys.argv[2]), float(sys.argv[3]))
