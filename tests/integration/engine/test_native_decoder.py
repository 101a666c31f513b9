"""The project's own kernels compute what PyTorch computes, for every family, type, shape and instruction set."""

from __future__ import annotations

import dataclasses
import platform
import random
from typing import TYPE_CHECKING

import pytest
import torch

import baton.engine.heads as torch_heads
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.int8_weight import Int8Weight
from baton.engine.kv_pool import KVPool, torch_dtype
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import build, compiler
from baton.engine.native.decoder import NativeDecoder
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, Linear, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import GREEDY, Sequence, generate, step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

NUM_BLOCKS = 400
VOCAB_SIZE = families.SMALL["vocab_size"]
KINDS = ("float32", "bfloat16", "float16", "int8")
# With int8 weights activations are rounded to 16 bits: the same rounding in PyTorch moves these logits by 3e-3.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 4e-3, "int8": 6e-3}


@pytest.fixture(scope="module")
def native_library() -> Path:
    path = build()
    assert path is not None
    return path


@pytest.fixture(scope="module", params=families.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    families.save_model(request.param, path)
    return path


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    families.save_model("qwen3-window", path)
    return path


def load(folder: Path, kind: str = "float32", *, block_size: int = 4) -> tuple[DecoderModel, KVPool]:
    """A model, and a pool full of noise, so that a wrong block or position shows. `kind` int8: with a float32 pool."""
    config = DecoderConfig.from_folder(folder)
    dtype, quantization = ("float32", "int8") if kind == "int8" else (kind, "none")
    weights = DecoderWeights.from_folder(
        folder, config, WeightForm(dtype=torch_dtype(dtype), quantization=quantization)
    )
    pool = KVPool(config.kv_layout(block_size, dtype), NUM_BLOCKS)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
    return DecoderModel(config, weights), pool


def widened(model: DecoderModel) -> DecoderModel:
    """The same model with its weights' values in float32."""

    def wide(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float32)
        if isinstance(value, torch.dtype):
            return torch.float32
        if isinstance(value, Int8Weight):
            return value.rows(slice(None), torch.float32)
        if isinstance(value, Linear):
            return Linear(wide(value.weight), wide(value.bias))
        if isinstance(value, tuple):
            return tuple(wide(each) for each in value)
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return dataclasses.replace(value, **{name: wide(getattr(value, name)) for name in names})
        return value

    return DecoderModel(model.config, wide(model.weights))


def copy_of(pool: KVPool, dtype: str | None = None) -> KVPool:
    copy = KVPool(dataclasses.replace(pool.layout, dtype=dtype or pool.layout.dtype), pool.num_blocks)
    copy.tensor.copy_(pool.tensor)
    return copy


def rows(positions: list[int], block_size: int = 4, *, samples: bool = True, seed: int = 0) -> BatchPlan:
    """A decode step: a row at each of these positions, each with its own blocks in random order."""
    generator = random.Random(seed)
    free = generator.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    return BatchPlan(
        slices=[
            SequenceSlice(
                attempt_id=str(row),
                token_ids=[generator.randrange(VOCAB_SIZE)],
                start_position=position,
                block_table=[free.pop() for _ in range(position // block_size + 1)],
                sampling=GREEDY if samples or row % 3 else None,
            )
            for row, position in enumerate(positions)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_cache_equal_those_of_torch(
    folder: Path, native_library: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(folder, native_library, kind, monkeypatch)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
@pytest.mark.parametrize("kind", KINDS)
def test_so_do_those_of_the_smallest_instruction_set(qwen3: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of 4 lanes and no fused multiplication, where the machine's own code has other ones."""
    library = build(machine="-march=x86-64")
    assert library is not None
    compare(qwen3, library, kind, monkeypatch)


def compare(folder: Path, library: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = load(folder, kind)
    dtype = pool.tensor.dtype
    reference, reference_pool = widened(model), copy_of(pool, "float32")
    write = torch_heads._write

    def write_rounded(pool: KVPool, pool_rows: torch.Tensor, layer: int, keys_values: torch.Tensor) -> None:
        write(pool, pool_rows, layer, keys_values.to(dtype).to(torch.float32))

    monkeypatch.setattr(torch_heads, "_write", write_rounded)
    decoder = NativeDecoder(model, pool, library=library, num_threads=2)
    # Around the edges of blocks (4), windows (5, 7, 8, 9) and spans of keys (128).
    positions = [0, 3, 4, 5, 6, 7, 8, 9, 10, 37, 126, 127, 128, 129, 255]
    plan = rows(positions, samples=False)
    expected = reference.forward(plan, reference_pool)
    torch.testing.assert_close(decoder.forward(plan), expected, rtol=0.0, atol=TOLERANCE[kind])
    difference = (pool.tensor.float() - reference_pool.tensor).abs()
    assert difference.max() <= TOLERANCE[kind] * 4
    assert (pool.tensor.float() != reference_pool.tensor).any(dim=(1, 2, 4, 5)).sum() <= len(positions)


@pytest.mark.parametrize("block_size", [1, 3, 16, 200])
def test_any_block_size_will_do(qwen3: Path, native_library: Path, block_size: int) -> None:
    model, pool = load(qwen3, block_size=block_size)
    decoder = NativeDecoder(model, copy_of(pool), library=native_library, num_threads=1)
    plan = rows([0, 15, 16, 17, 130], block_size)
    torch.testing.assert_close(decoder.forward(plan), model.forward(plan, pool), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch_on_any_number_of_threads(
    qwen3: Path, native_library: Path, kind: str
) -> None:
    model, pool = load(qwen3, kind)
    plan = rows([(7 * row) % 41 for row in range(33)])
    one = NativeDecoder(model, pool, library=native_library, num_threads=1)
    expected = one.forward(plan).clone()
    cache = pool.tensor.clone()
    for num_threads in (1, 2, 5):
        decoder = NativeDecoder(model, pool, library=native_library, num_threads=num_threads)
        for size in (1, 2, 3, 4, 5, 7, 32, 33):
            part = BatchPlan(slices=plan.slices[33 - size :])
            assert torch.equal(decoder.forward(part), expected[33 - size :])
        assert torch.equal(pool.tensor, cache)
    for num_threads in (3, 1, 2):
        one.use_threads(num_threads)
        assert torch.equal(one.forward(plan), expected)


def test_more_rows_than_the_cache_holds_activations_of(qwen3: Path, native_library: Path) -> None:
    model, pool = load(qwen3)
    plan = rows([row % 7 for row in range(101)])
    decoder = NativeDecoder(model, copy_of(pool), library=native_library, num_threads=2)
    torch.testing.assert_close(decoder.forward(plan), model.forward(plan, pool), rtol=0.0, atol=1e-4)


def test_greedy_tokens_equal_those_of_generate(folder: Path, native_library: Path) -> None:
    model, pool = load(folder)
    executor = TorchExecutor(model, pool, NativeDecoder(model, pool, library=native_library, num_threads=2))
    reference = families.reference_model(folder)
    prompt = random.Random(2).choices(range(VOCAB_SIZE), k=23)
    expected = families.reference_tokens(reference, prompt, 24)
    assert generate(executor, Sequence("whole", prompt, list(range(40, 52))), 24) == expected
    assert generate(executor, Sequence("by the token", prompt, list(range(20, 32))), 24, chunks=(1,)) == expected


def test_chunks_and_single_tokens_mix_in_a_step(folder: Path, native_library: Path) -> None:
    model, pool = load(folder)
    executor = TorchExecutor(model, pool, NativeDecoder(model, pool, library=native_library, num_threads=2))
    reference = families.reference_model(folder)
    sequences = [
        Sequence(str(i), random.Random(i).choices(range(VOCAB_SIZE), k=length), list(range(30 * i, 30 * i + 20)))
        for i, length in enumerate([1, 50, 6, 17])
    ]
    for turn in range(24):
        running = [s for i, s in enumerate(sequences) if turn >= 2 * i and len(s.tokens) < 10]
        step(executor, [(s, 1 + 5 * index) for index, s in enumerate(running)])
    for sequence in sequences[:1] + sequences[2:]:
        assert sequence.tokens == families.reference_tokens(reference, sequence.prompt, 10)


def test_a_real_model_has_the_logits_of_torch(model_folder: Path, native_library: Path) -> None:
    config = DecoderConfig.from_folder(model_folder)
    weights = DecoderWeights.from_folder(model_folder, config, WeightForm(dtype=torch.float32))
    model, pool = DecoderModel(config, weights), KVPool(config.kv_layout(16, "float32"), 4)
    other_pool = copy_of(pool)
    decoder = NativeDecoder(model, other_pool, library=native_library, num_threads=2)
    for position, token in enumerate([504, 3575, 282, 4649]):
        piece = SequenceSlice(
            attempt_id="a", token_ids=[token], start_position=position, block_table=[3], sampling=GREEDY
        )
        plan = BatchPlan(slices=[piece])
        torch.testing.assert_close(decoder.forward(plan), model.forward(plan, pool), rtol=1e-4, atol=1e-3)


def test_a_token_beyond_the_vocabulary_is_a_bug_that_is_told(qwen3: Path, native_library: Path) -> None:
    model, pool = load(qwen3)
    decoder = NativeDecoder(model, pool, library=native_library, num_threads=1)
    piece = dataclasses.replace(rows([5]).slices[0], token_ids=[VOCAB_SIZE])
    before = pool.tensor.clone()
    with pytest.raises(AssertionError, match="not below 211"):
        decoder.forward(BatchPlan(slices=[piece]))
    assert torch.equal(pool.tensor, before)


def test_a_step_without_samples_has_no_logits(qwen3: Path, native_library: Path) -> None:
    model, pool = load(qwen3)
    decoder = NativeDecoder(model, pool, library=native_library, num_threads=2)
    pieces = [dataclasses.replace(piece, sampling=None) for piece in rows([5, 6]).slices]
    assert decoder.forward(BatchPlan(slices=pieces)).shape == (0, VOCAB_SIZE)


def test_a_fault_in_activations_shows_with_int8_weights_too(qwen3: Path, native_library: Path) -> None:
    """Rounding to whole numbers must not turn what is not a number into one."""
    model, pool = load(qwen3, "int8")
    table = model.weights.embeddings
    assert isinstance(table, Int8Weight)
    plan = rows([3, 4])
    with torch.inference_mode():
        table.scales[plan.slices[0].token_ids[0]] = float("nan")
    logits = NativeDecoder(model, pool, library=native_library, num_threads=1).forward(plan)
    assert logits[0].isnan().any()
