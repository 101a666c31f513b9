from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.core.errors import StartupError
from baton.core.model import KVLayout
from baton.engine.kv_pool import KVPool, torch_dtype
from baton.engine.sharding import Shard


def layout(dtype: str = "float32") -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=5, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_pool_lies_over_the_storage_given(dtype):
    storage = torch.zeros(7 * layout(dtype).block_bytes + 13, dtype=torch.uint8)
    pool = KVPool(layout(dtype), 7, storage=storage)
    assert pool.tensor.shape == (7, 3, 2, 5, 2, 4)
    pool.tensor[2] = 1.0
    block = layout(dtype).block_bytes
    assert storage[2 * block : 3 * block].view(pool.tensor.dtype).eq(1.0).all()
    assert not storage[: 2 * block].any()
    assert not storage[3 * block :].any()


def test_the_views_index_the_same_memory():
    pool = KVPool(layout(), 7)
    pool.tensor[:] = torch.randn_like(pool.tensor)
    torch.testing.assert_close(pool.slabs_view()[(4 * 3 + 2) * 2 + 1], pool.tensor[4, 2, 1].flatten(1))
    torch.testing.assert_close(pool.positions_view()[((4 * 3 + 2) * 2 + 1) * 5 + 3], pool.tensor[4, 2, 1, 3].flatten())


def test_a_part_has_one_ranks_heads_of_the_same_memory():
    whole = KVPool(layout(), 7)
    whole.tensor[:] = torch.randn_like(whole.tensor)
    part = whole.part(Shard(1, 2))
    assert (part.layout, part.num_blocks) == (replace(layout(), num_kv_heads=1), 7)
    torch.testing.assert_close(part.slabs_view()[5], whole.tensor[0, 2, 1, :, 1])
    part.positions_view()[3] = 1.0
    assert whole.tensor[0, 0, 0, 3, 1].eq(1.0).all()
    assert not whole.tensor[0, 0, 0, 3, 0].eq(1.0).any()


@pytest.mark.parametrize(
    ("num_blocks", "storage", "message"),
    [
        (0, None, "too small for one block"),
        (2, torch.zeros(10, dtype=torch.uint8), "at least"),
        (1, torch.zeros(10_000), "flat uint8"),
        (10**12, None, "the machine has"),
    ],
)
def test_memory_that_does_not_fit_is_refused(num_blocks, storage, message):
    with pytest.raises(StartupError, match=message):
        KVPool(layout(), num_blocks, storage=storage)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(StartupError, match="'int3' is not supported; choose one of bfloat16, float16, float32"):
        torch_dtype("int3")
