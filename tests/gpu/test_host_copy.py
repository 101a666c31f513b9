"""Blocks of a pool on a device, copied to host memory after each step, and read there for another pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.clock import SystemClock
from baton.core.model import KVLayout
from baton.engine.block_moves import Way
from baton.engine.host_copy import HostCopy, MirrorExecutor
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from kv_transfer.descriptor import KVDescriptor, PeerKey, PeerPool, ShmHandle
from kv_transfer.lease import LeaseTable
from kv_transfer.segment import SegmentSpec
from kv_transfer.shm import ShmReader
from kv_transfer.source import SourcePool
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence, generate, step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

PEER = PeerKey("prefill-1", "life-1")
NUM_BLOCKS = 40


def test_pieces_go_out_and_come_back_to_the_bit_in_other_places() -> None:
    layout = KVLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16, dtype="bfloat16")
    pool, host = KVPool(layout, 256, device="cuda"), KVPool(layout, 300)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.cpu()
    blocks = HostCopy(pool, host)
    out = list(range(20, 240))
    blocks.move(Way.OUT, out, list(range(79, 299)))
    assert torch.equal(host.tensor[79:299], before[out])
    pool.tensor.zero_()
    blocks.move(Way.BACK, list(range(79, 299)), list(range(219, -1, -1)))
    assert torch.equal(pool.tensor[:220].cpu(), before[out[::-1]])


@pytest.mark.parametrize("block_size", [16, 24])
def test_a_device_pool_is_read_from_its_host_copy_into_another_device_pool(tmp_path: Path, block_size: int) -> None:
    families.save_model("llama", tmp_path)
    layout = DecoderConfig.from_folder(tmp_path).kv_layout(16, "float32")
    spec = SegmentSpec(layout=layout, num_blocks=NUM_BLOCKS, num_slots=4, incarnation=PEER.incarnation)
    source = SourcePool.create(spec, "cuda:0", host_copy=True)
    assert source.host_copy is not None
    try:
        pool = KVPool(layout, NUM_BLOCKS, storage=source.storage)
        blocks = HostCopy(pool, KVPool(layout, NUM_BLOCKS, storage=source.host_copy))
        prefill = MirrorExecutor(TorchExecutor.from_folder(tmp_path, pool=pool), blocks)
        prompt, table = [5 + index % 16 for index in range(70)], [9, 3, 4, 5, 0, 7]
        sequence = Sequence("a", prompt, table)
        step(prefill, [(sequence, 32)])
        step(prefill, [(sequence, 100)])
        lease = LeaseTable(source.fences, SystemClock(), lease_s=60.0).grant("lease", "a", table[:5])
        kv = KVDescriptor(
            lease_id="lease",
            lease_slot=lease.slot,
            generation=lease.generation,
            worker_id=PEER.worker_id,
            incarnation=PEER.incarnation,
            address="",
            block_ids=lease.block_ids,
            num_tokens=len(prompt),
            lease_s=60.0,
        )
        (handle,) = [each for each in source.handles if isinstance(each, ShmHandle)]
        reader = ShmReader.open(PeerPool(peer=PEER, layout=layout, address="", secret=b"", handles=(handle,)), handle)
        ours = DecoderConfig.from_folder(tmp_path).kv_layout(block_size, "float32")
        into = KVPool(ours, NUM_BLOCKS, device="cuda:0")
        num_here = ours.blocks_for(len(prompt))
        reader.read(kv, into, range(10, 10 + num_here))
        decode = TorchExecutor.from_folder(tmp_path, pool=into)
        sequence.block_table = list(range(10, 20))
        expected = families.reference_tokens(families.reference_model(tmp_path), prompt, 12)
        assert generate(decode, sequence, 12) == expected
        reader.close()
    finally:
        source.close()
