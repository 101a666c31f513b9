"""Recorded decode steps give the tokens of those that are not, whoever joins and leaves, and touch nobody's blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan
from baton.engine.decode_graphs import batch_sizes
from baton.engine.flashinfer_attention import FlashInferAttention
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import cuda_twins, families
from tests.integration.engine.sequences import GREEDY, Sequence, step

if TYPE_CHECKING:
    from pathlib import Path

NUM_BLOCKS = 61
MAX_ROWS = 5


def executor_of(folder: Path) -> tuple[TorchExecutor, KVPool]:
    config = DecoderConfig.from_folder(folder)
    pool = KVPool(config.kv_layout(4, "float32"), NUM_BLOCKS)
    weights = DecoderWeights.from_folder(folder, config, WeightForm(dtype=torch.float32))
    attention = FlashInferAttention(cuda_twins, config, pool)
    return TorchExecutor(DecoderModel(config, weights, attention=attention), pool), pool


def recorded(folder: Path) -> tuple[TorchExecutor, KVPool, cuda_twins.TapeRecorder]:
    executor, pool = executor_of(folder)
    recorder = cuda_twins.TapeRecorder()
    executor.record_decode(MAX_ROWS, recorder)
    executor.warm_up()
    return executor, pool, recorder


def work() -> list[Sequence]:
    """In blocks of other sequences' numbers, so that a mix-up shows."""
    samplings = [GREEDY, SamplingParams(seed=5), GREEDY, SamplingParams(seed=6, top_k=20), GREEDY, GREEDY]
    return [
        Sequence(f"s{i}", list(range(3 + 7 * i, 3 + 7 * i + 4 + i)), list(range(i * 10, i * 10 + 10))[::-1], sampling)
        for i, sampling in enumerate(samplings)
    ]


# Who is in each decode step: joining, leaving, in other places, and more than were recorded.
COMPANIES = [
    (0,),
    (0, 1),
    (2, 0, 1),
    (0, 1, 2, 3),
    (3, 2, 1, 0, 4),
    (4, 1),
    (0, 1, 2, 3, 4, 5),
    (5,),
    (1, 5, 3),
    (1, 5),
]


@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_joining_and_leaving_sequences_get_the_tokens_and_the_cache_of_eager_steps(name, tmp_path):
    families.save_model(name, tmp_path)
    eager, eager_pool = executor_of(tmp_path)
    graphed, pool, recorder = recorded(tmp_path)
    eager_pool.tensor.copy_(pool.tensor)
    eager_work, graphed_work = work(), work()
    for executor, sequences in ((eager, eager_work), (graphed, graphed_work)):
        step(executor, [(sequence, 100) for sequence in sequences])
    recorder.replayed.clear()
    scratch = NUM_BLOCKS - 1
    for company in COMPANIES:
        step(eager, [(eager_work[i], 1) for i in company])
        step(graphed, [(graphed_work[i], 1) for i in company])
        torch.testing.assert_close(pool.tensor[:scratch], eager_pool.tensor[:scratch])
    assert [each.tokens for each in graphed_work] == [each.tokens for each in eager_work]
    assert recorder.replayed == [1, 2, 3, 4, 5, 2, 1, 3, 2]
    assert max(len(each.tokens) for each in graphed_work) > 7  # across the ends of blocks


def test_rows_that_fill_up_change_the_last_block_alone_and_that_is_nobodys(tmp_path):
    families.save_model("llama", tmp_path)
    executor, pool, recorder = recorded(tmp_path)
    assert executor.num_blocks == NUM_BLOCKS - 1
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()
    sequences = [Sequence(name, [1, 2, 3], [block]) for name, block in (("a", 7), ("b", 9), ("c", 11), ("d", 13))]
    for sequence in sequences:
        sequence.num_computed = 2
    executor.record_decode(8, recorder)
    executor.warm_up()
    pool.tensor.copy_(before)
    recorder.replayed.clear()
    step(executor, [(sequence, 1) for sequence in sequences[:4]] + [(Sequence("e", [1], [15]), 1)])
    assert recorder.replayed == [6]
    changed = (pool.tensor != before).flatten(4).any(-1).any(1).any(1)  # blocks and positions
    assert changed.nonzero().tolist() == [[7, 2], [9, 2], [11, 2], [13, 2], [15, 0], [NUM_BLOCKS - 1, 0]]
    with pytest.raises(AssertionError, match="beyond 59"):
        step(executor, [(Sequence("f", [1], [NUM_BLOCKS - 1]), 1)])


def test_what_is_no_decode_step_is_not_replayed(tmp_path):
    families.save_model("llama", tmp_path)
    executor, _, recorder = recorded(tmp_path)
    recorder.replayed.clear()
    single, chunk = Sequence("a", [1], [0]).next_slice(1), Sequence("b", [1, 2], [1]).next_slice(2)
    executor.execute(BatchPlan(slices=[single, chunk]))
    executor.execute(BatchPlan(slices=[replace(single, sampling=None)]))
    assert recorder.replayed == []
    executor.execute(BatchPlan(slices=[single]))
    assert recorder.replayed == [1]


def test_where_nothing_can_be_recorded_steps_run_as_without_and_the_log_says_why(tmp_path, caplog, monkeypatch):
    families.save_model("llama", tmp_path)
    executor, _ = executor_of(tmp_path)
    monkeypatch.setattr(cuda_twins._Tape, "__torch_dispatch__", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    executor.record_decode(MAX_ROWS, cuda_twins.TapeRecorder())
    executor.warm_up()
    expected, got = Sequence("a", [1, 2, 3], [0, 1]), Sequence("a", [1, 2, 3], [0, 1])
    config = executor.model.config
    plain = TorchExecutor(DecoderModel(config, executor.model.weights), KVPool(executor.layout, NUM_BLOCKS))
    plain.record_decode(MAX_ROWS, cuda_twins.TapeRecorder())
    for _ in range(3):
        step(plain, [(expected, 3)])
        step(executor, [(got, 3)])
    assert got.tokens == expected.tokens
    assert plain.num_blocks == NUM_BLOCKS
    assert [record.getMessage() for record in caplog.records] == [
        "decode steps are not recorded: no",
        "decode steps are not recorded: PyTorch's attention changes its shapes with each",
    ]


def test_a_third_of_the_rows_at_most_only_fill_up():
    assert batch_sizes(1) == [1]
    assert batch_sizes(5) == [1, 2, 3, 4, 5]
    assert batch_sizes(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert batch_sizes(100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    sizes = batch_sizes(300)
    for rows in range(1, 301):
        assert next(size for size in sizes if size >= rows) - rows <= rows / 2
