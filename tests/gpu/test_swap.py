"""Blocks of a pool on a device, moved to pinned host memory and back."""

from __future__ import annotations

import pytest
import torch

from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool
from kv_transfer.swap import SwapSpace

pytestmark = pytest.mark.gpu


def test_blocks_come_back_to_the_bit_in_other_places():
    layout = KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
    pool = KVPool(layout, 64, device="cuda")
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    torch.cuda.synchronize()
    before = pool.tensor.clone()
    space = SwapSpace(pool, 32)
    out, slots, back = list(range(10, 40)), list(range(30)), list(range(63, 33, -1))
    space.save(out, slots)
    pool.tensor.zero_()
    torch.cuda.synchronize()
    space.restore(slots, back)
    assert torch.equal(pool.tensor[back], before[out])
    assert not pool.tensor[:34].any()
