"""Ranks that divide a model compute what one process computes, in every family. Here the ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine.batch import BatchPlan
from baton.engine.host_group import HostGroup
from baton.engine.host_memory import SharedMemory
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.sharding import Shard
from baton.engine.weights import DecoderWeights, WeightForm
from benchmarks.random_model import save_random_llama
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK_SIZE = 4
NUM_BLOCKS = 60


class Ranks:
    """A group of threads over one pool, each with its part of the model."""

    def __init__(self, folder: Path, size: int, quantization: str = "none") -> None:
        config = DecoderConfig.from_folder(folder)
        self.pool = KVPool(config.kv_layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
        self._threads = ThreadPoolExecutor(size)
        self._memory = SharedMemory.create(HostGroup.num_bytes(size))
        self._shards = [Shard(rank, size) for rank in range(size)]
        self._groups = [HostGroup(shard, self._memory, timeout_s=120) for shard in self._shards]
        self.each(lambda rank: self._groups[rank].join(1))
        self.models = [
            DecoderModel(
                config.part(shard),
                DecoderWeights.from_folder(
                    folder, config, WeightForm(dtype=torch.float32, quantization=quantization, shard=shard)
                ),
                group,
            )
            for shard, group in zip(self._shards, self._groups, strict=True)
        ]

    def each(self, call: Callable[[int], torch.Tensor | None]) -> list[torch.Tensor | None]:
        return list(self._threads.map(call, range(len(self._shards))))

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """All ranks' logits, which must be the same to the bit."""
        logits = self.each(lambda rank: self.models[rank].forward(plan, self.pool.part(self._shards[rank])))
        assert all(torch.equal(logits[0], other) for other in logits[1:])
        return logits[0]

    def close(self) -> None:
        for group in self._groups:
            group.leave()
        self._threads.shutdown()
        self._memory.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(folder: Path, size: int, quantization: str = "none") -> Ranks:
        started.append(Ranks(folder, size, quantization))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def work() -> list[Sequence]:
    prompts = [list(range(5, 24)), list(range(40, 47)), [3]]
    return [Sequence(f"s{i}", prompt, list(range(i * 12, i * 12 + 12))[::-1]) for i, prompt in enumerate(prompts)]


def run(forward: Callable[[BatchPlan], torch.Tensor], sequences: list[Sequence], num_steps: int) -> list[torch.Tensor]:
    """Prompts in chunks of 8 beside decode steps; each step's logits."""
    steps = []
    for _ in range(num_steps):
        pieces = [sequence.next_slice(8) for sequence in sequences]
        logits = forward(BatchPlan(slices=pieces))
        steps.append(logits)
        tokens = iter(logits.argmax(1).tolist())
        for sequence, piece in zip(sequences, pieces, strict=True):
            sequence.num_computed = piece.end_position
            if piece.sampling is not None:
                sequence.tokens.append(next(tokens))
    return steps


@pytest.mark.parametrize("name", families.FAMILIES)
def test_two_ranks_give_the_logits_and_the_cache_of_one(name, tmp_path, start) -> None:
    families.save_model(name, tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32))
    alone, pool = DecoderModel(config, weights), KVPool(config.kv_layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
    ranks = start(tmp_path, 2)
    expected_work, divided_work = work(), work()
    expected = run(lambda plan: alone.forward(plan, pool), expected_work, 7)
    divided = run(ranks.forward, divided_work, 7)
    assert [sequence.tokens for sequence in divided_work] == [sequence.tokens for sequence in expected_work]
    torch.testing.assert_close(divided, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ranks.pool.tensor, pool.tensor, rtol=1e-4, atol=1e-4)


def test_int8_weights_of_two_ranks_are_those_of_one(tmp_path, start) -> None:
    """Each rank quantizes its own part: where that is whole groups of inputs, to the same numbers."""
    save_random_llama(tmp_path, num_positions=64, hidden_size=256, num_layers=2, vocab_size=256)
    config = DecoderConfig.from_folder(tmp_path)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32, quantization="int8"))
    alone, pool = DecoderModel(config, weights), KVPool(config.kv_layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
    ranks = start(tmp_path, 2, "int8")
    expected_work, divided_work = work(), work()
    expected = run(lambda plan: alone.forward(plan, pool), expected_work, 7)
    divided = run(ranks.forward, divided_work, 7)
    assert [sequence.tokens for sequence in divided_work] == [sequence.tokens for sequence in expected_work]
    torch.testing.assert_close(divided, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 4])
def test_ranks_that_do_not_divide_the_heads_have_unequal_parts(tmp_path, start, size) -> None:
    families.save_model("llama-all-heads", tmp_path)
    model = families.reference_model(tmp_path)
    ranks = start(tmp_path, size)
    assert sum(part.config.num_kv_heads for part in ranks.models) == 6
    prompt = list(range(5, 24))
    sequence = Sequence("a", prompt, list(range(12)))
    run(ranks.forward, [sequence], 10)
    assert sequence.tokens == families.reference_tokens(model, prompt, len(sequence.tokens))


def test_more_ranks_than_kv_heads_are_refused(tmp_path) -> None:
    families.save_model("llama", tmp_path)
    with pytest.raises(StartupError, match=r"engine\.tensor_parallel_size: 3 ranks cannot divide the 2 KV heads"):
        DecoderConfig.from_folder(tmp_path).part(Shard(0, 3))
