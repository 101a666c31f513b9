"""The arguments that FlashInfer is given, held against PyTorch's attention by a twin of the library."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.engine.attention import TorchAttention
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.flashinfer_attention import FlashInferAttention, PageTable, open_flashinfer
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import cuda_twins, families
from tests.integration.engine.sequences import Sequence, generate, step

# First position and number of tokens: chunks and single tokens, around the ends of blocks and of windows.
SPANS = ((0, 3), (0, 9), (5, 2), (16, 1), (15, 1), (0, 1), (30, 7), (61, 1))


def piece(start: int, count: int, table: list[int]) -> SequenceSlice:
    return SequenceSlice(attempt_id="a", token_ids=[1] * count, start_position=start, block_table=table, sampling=None)


def test_the_pages_of_a_mixed_step():
    slices = [piece(0, 3, [7, 8]), piece(5, 2, [3, 1, 9]), piece(8, 1, [4, 5, 6]), piece(7, 1, [2, 0])]
    table = PageTable.of(BatchPlan(slices=slices), 4)
    assert table.row_ends.tolist() == [0, 3, 5, 6, 7]
    assert table.page_ends.tolist() == [0, 1, 3, 6, 8]
    assert table.pages.tolist() == [7, 3, 1, 4, 5, 6, 2, 0]
    assert table.last_lengths.tolist() == [3, 3, 1, 4]


@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (9, 1)])
def test_ragged_batches_of_chunks_and_single_tokens_equal_torch(window, heads, tmp_path):
    families.save_model("llama", tmp_path)
    num_heads, num_kv_heads = heads
    config = replace(
        DecoderConfig.from_folder(tmp_path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        sliding_windows=(window,) * 3,
    )
    pool = KVPool(config.kv_layout(4, "float32"), 200)
    generator = torch.Generator().manual_seed(1)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, generator=generator))
    blocks = torch.randperm(200, generator=generator).tolist()
    plan = BatchPlan(slices=[piece(*span, blocks[i * 18 : i * 18 + 18]) for i, span in enumerate(SPANS)])
    queries = torch.randn(
        plan.num_tokens, num_kv_heads, num_heads // num_kv_heads, config.head_dim, generator=generator
    )
    own = torch.stack(
        [
            pool.tensor[each.block_table[position // 4], 1, :, position % 4]
            for each in plan.slices
            for position in range(each.start_position, each.end_position)
        ]
    )
    expected = TorchAttention(torch.float32).plan(plan, pool, window).run(queries, own, pool, 1)
    attention = FlashInferAttention(cuda_twins, config, pool)
    torch.testing.assert_close(attention.plan(plan, pool, window).run(queries, own, pool, 1), expected)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-window", "qwen3"])
def test_a_model_generates_the_tokens_of_the_reference(name, tmp_path):
    families.save_model(name, tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    pool = KVPool(config.kv_layout(4, "float32"), 60)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32))
    attention = FlashInferAttention(cuda_twins, config, pool)
    executor = TorchExecutor(DecoderModel(config, weights, attention=attention), pool)
    model = families.reference_model(tmp_path)
    prompts = [list(range(5, 24)), list(range(40, 47))]
    first, second = (Sequence(str(i), prompt, list(range(i * 12, i * 12 + 12))) for i, prompt in enumerate(prompts))
    generate(executor, first, 3)
    for _ in range(5):  # single tokens of one beside chunks of the other
        step(executor, [(first, 1), (second, 3)])
    for sequence in (first, second):
        assert sequence.tokens == families.reference_tokens(model, sequence.prompt, len(sequence.tokens))


def test_without_the_library_it_says_why(tmp_path, caplog):
    families.save_model("llama", tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    assert open_flashinfer(config, KVPool(config.kv_layout(4, "bfloat16"), 2)) is None
    assert open_flashinfer(config, KVPool(config.kv_layout(4, "float32"), 2)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu: PyTorch's own, because No module named 'flashinfer'",
        "attention on cpu: PyTorch's own, because FlashInfer computes in 16 bits",
    ]
