"""FlashInfer computes what PyTorch does, over the pool as it lies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from baton.engine.attention import TorchAttention
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.flashinfer_attention import open_flashinfer
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from tests.gpu.models import BLOCK_SIZE, save_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# The kernels may have to be compiled first.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# First position and number of tokens.
MIXED = ((0, 3), (0, 200), (5, 2), (16, 1), (15, 1), (0, 1), (300, 70), (1000, 1))
DECODE = ((4095, 1),) * 32


def step_of(spans: tuple[tuple[int, int], ...], num_blocks: int) -> BatchPlan:
    blocks = torch.randperm(num_blocks).tolist()
    slices = []
    for start, count in spans:
        needed = -(-(start + count) // BLOCK_SIZE)
        table, blocks = blocks[:needed], blocks[needed:]
        piece = SequenceSlice(
            attempt_id="a", token_ids=[1] * count, start_position=start, block_table=table, sampling=None
        )
        slices.append(piece)
    return BatchPlan(slices=slices)


def random_pool(config: DecoderConfig, num_blocks: int) -> KVPool:
    pool = KVPool(config.kv_layout(BLOCK_SIZE, "bfloat16"), num_blocks, device="cuda")
    pool.tensor.normal_()
    return pool


def random_queries(plan: BatchPlan, config: DecoderConfig) -> torch.Tensor:
    group = config.num_heads // config.num_kv_heads
    shape = (plan.num_tokens, config.num_kv_heads, group, config.head_dim)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


@pytest.fixture
def config(tmp_path: Path) -> DecoderConfig:
    pytest.importorskip("flashinfer")
    save_model(tmp_path, num_layers=2)
    return DecoderConfig.from_folder(tmp_path)


@pytest.mark.parametrize("window", [None, 40])
def test_a_mixed_step_equals_that_of_torch(window: int | None, config: DecoderConfig) -> None:
    torch.manual_seed(1)
    config = replace(config, sliding_windows=(window,) * 2)
    pool = random_pool(config, 200)
    plan = step_of(MIXED, 200)
    queries = random_queries(plan, config)
    own = torch.stack(
        [
            pool.tensor[piece.block_table[position // BLOCK_SIZE], 1, :, position % BLOCK_SIZE]
            for piece in plan.slices
            for position in range(piece.start_position, piece.end_position)
        ]
    )
    attention = open_flashinfer(config, pool)
    assert attention is not None
    got = attention.plan(plan, pool, window).run(queries, own, pool, 1)
    expected = TorchAttention(torch.float32).plan(plan, pool, window).run(queries.float(), own.float(), pool, 1)
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)


def test_how_fast_decode_attention_reads_the_pool(
    config: DecoderConfig, record_property: Callable[[str, object], None]
) -> None:
    pool = random_pool(config, 32 * 4096 // BLOCK_SIZE)
    plan = step_of(DECODE, pool.num_blocks)
    queries = random_queries(plan, config)
    attention = open_flashinfer(config, pool)
    assert attention is not None
    for name, planned in (
        ("FlashInfer", attention.plan(plan, pool, None)),
        ("PyTorch", TorchAttention(torch.bfloat16).plan(plan, pool, None)),
    ):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        planned.run(queries, queries, pool, 0)
        begin.record()
        for turn in range(20):
            planned.run(queries, queries, pool, turn % 2)
        end.record()
        end.synchronize()
        num_bytes = 20 * pool.tensor[:, 0].nbytes
        record_property(f"{name}, 32 x 4096 keys", f"{num_bytes / begin.elapsed_time(end) / 1e6:.0f} GB/s")
