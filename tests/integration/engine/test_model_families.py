"""Every family computes what transformers computes, whatever way its sequences are cut and batched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import GREEDY, Sequence, generate, step

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 4
NUM_BLOCKS = 200
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


class Subject:
    """A family's model in transformers and in the engine."""

    def __init__(self, name: str, folder: Path) -> None:
        families.save_model(name, folder)
        self.reference: Any = families.reference_model(folder)
        config = DecoderConfig.from_folder(folder)
        self.pool = KVPool(config.kv_layout(BLOCK_SIZE, "float32"), NUM_BLOCKS)
        # What lies in unused blocks must never matter.
        self.pool.tensor.normal_(std=100.0)
        weights = DecoderWeights.from_folder(folder, config, WeightForm(dtype=torch.float32))
        self.model = DecoderModel(config, weights)
        self.executor = TorchExecutor(self.model, self.pool)

    def logits(self, *slices: SequenceSlice) -> torch.Tensor:
        return self.model.forward(BatchPlan(slices=slices), self.pool)


@pytest.fixture(scope="module", params=families.FAMILIES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp(request.param))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(families.SMALL["vocab_size"], (length,), generator=generator).tolist()


def blocks(count: int, seed: int = 0) -> list[int]:
    """A table of scattered blocks; different seeds share none."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    return order[seed * 25 : seed * 25 + count]


def piece(tokens: list[int], start: int, table: list[int], *, samples: bool = True) -> SequenceSlice:
    return SequenceSlice(
        attempt_id=f"attempt-{table[0]}",
        token_ids=tokens,
        start_position=start,
        block_table=table,
        sampling=GREEDY if samples else None,
    )


@pytest.mark.parametrize("length", [1, 4, 5, 37])
def test_one_shot_prefill_gives_the_reference_logits(subject: Subject, length: int) -> None:
    tokens = prompt(length)
    logits = subject.logits(piece(tokens, 0, blocks(10)))
    torch.testing.assert_close(logits[0], families.reference_logits(subject.reference, tokens)[-1], **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 36])
def test_each_chunk_gives_the_reference_logits(subject: Subject, chunk: int) -> None:
    tokens, table = prompt(37), blocks(10)
    expected = families.reference_logits(subject.reference, tokens)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = subject.logits(piece(part, start, table))
        torch.testing.assert_close(logits[0], expected[start + len(part) - 1], **TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_chunks_leave_the_same_keys_and_values(subject: Subject, chunk: int) -> None:
    tokens, whole, cut = prompt(37), blocks(10, 1), blocks(10, 2)
    subject.logits(piece(tokens, 0, whole))
    for start in range(0, len(tokens), chunk):
        subject.logits(piece(tokens[start : start + chunk], start, cut, samples=False))

    def written(table: list[int]) -> torch.Tensor:
        # [layers, 2, blocks * block_size, heads, head_dim], the positions written
        return subject.pool.tensor[table].permute(1, 2, 0, 3, 4, 5).flatten(2, 3)[:, :, : len(tokens)]

    torch.testing.assert_close(written(cut), written(whole), **TOLERANCE)


def test_a_step_touches_no_other_position(subject: Subject) -> None:
    before = subject.pool.tensor.clone()
    table = blocks(3)
    subject.logits(piece(prompt(5), 0, table), piece([7], 9, blocks(3, 1)))
    changed = (subject.pool.tensor != before).any(dim=(1, 2, 4, 5)).nonzero().tolist()
    mine = [[table[0], offset] for offset in range(4)] + [[table[1], 0], [blocks(3, 1)[2], 1]]
    assert sorted(changed) == sorted(mine)


def test_greedy_tokens_equal_those_of_generate(subject: Subject) -> None:
    tokens = prompt(23)
    expected = families.reference_tokens(subject.reference, tokens, 24)
    assert generate(subject.executor, Sequence("whole", tokens, blocks(12)), 24) == expected
    assert generate(subject.executor, Sequence("cut", tokens, blocks(12, 1)), 24, chunks=(5, 3)) == expected


def test_sequences_of_many_lengths_run_together(subject: Subject) -> None:
    """Prompts join while others decode, at every mix of prefill chunk and decode step."""
    lengths = [1, 50, 6, 17, 33]
    sequences = [Sequence(f"s{i}", prompt(n, i), blocks(20, i)) for i, n in enumerate(lengths)]
    for turn in range(24):
        running = [s for i, s in enumerate(sequences) if turn >= 2 * i and len(s.tokens) < 10]
        step(subject.executor, [(s, 6 + index) for index, s in enumerate(running)])
    for sequence in sequences:
        assert len(sequence.tokens) == 10
        assert sequence.tokens == families.reference_tokens(subject.reference, sequence.prompt, 10)


def test_only_slices_that_sample_have_logits(subject: Subject) -> None:
    tokens = prompt(9)
    logits = subject.logits(
        piece(tokens, 0, blocks(3), samples=False),
        piece(tokens[:5], 0, blocks(3, 1)),
        piece(tokens[:1], 0, blocks(3, 2), samples=False),
        piece(tokens[:2], 0, blocks(3, 3)),
    )
    expected = families.reference_logits(subject.reference, tokens)
    torch.testing.assert_close(logits, expected[[4, 1]], **TOLERANCE)
    assert subject.logits(piece(tokens, 0, blocks(3), samples=False)).shape == (0, families.SMALL["vocab_size"])
