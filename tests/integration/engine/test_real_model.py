"""The real model answers as it does in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer

from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import GREEDY, Sequence, step

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea, there lived an old fisherman who every morning before sunrise "
    "walked down to the harbour, untied his boat, and rowed out past the rocks where the gulls were nesting,",
]


@pytest.fixture(scope="module")
def real(model_folder: Path) -> tuple[DecoderModel, KVPool, Any, list[list[int]]]:
    config = DecoderConfig.from_folder(model_folder)
    weights = DecoderWeights.from_folder(model_folder, config, WeightForm(dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    pool = KVPool(config.kv_layout(16, "float32"), 40)
    return DecoderModel(config, weights), pool, families.reference_model(model_folder), prompts


def test_logits_equal_those_of_transformers(real) -> None:
    model, pool, reference, prompts = real
    slices = [
        SequenceSlice(attempt_id=str(i), token_ids=prompt, start_position=0, block_table=table(i), sampling=GREEDY)
        for i, prompt in enumerate(prompts)
    ]
    logits = model.forward(BatchPlan(slices=slices), pool)
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, families.reference_logits(reference, prompt)[-1], rtol=1e-4, atol=1e-3)


def test_greedy_texts_equal_those_of_transformers(real) -> None:
    """All prompts in one batch, in chunks of another size each, joining at different steps."""
    model, pool, reference, prompts = real
    executor = TorchExecutor(model, pool)
    sequences = [Sequence(str(i), prompt, table(i)) for i, prompt in enumerate(prompts)]
    while any(len(sequence.tokens) < 12 for sequence in sequences):
        step(executor, [(s, 3 + 8 * i) for i, s in enumerate(sequences) if len(s.tokens) < 12])
    for sequence in sequences:
        assert sequence.tokens == families.reference_tokens(reference, sequence.prompt, 12)


def table(index: int) -> list[int]:
    return list(range(index * 10, index * 10 + 10))
