"""The chunk attention kernel computes what PyTorch computes, for every head shape, window, type and block size."""

from __future__ import annotations

import dataclasses
import platform
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from baton.engine.attention import AttentionPlan
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.heads import TorchHeads
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import build, compiler
from baton.engine.native.chunks import ChunkKernels
from baton.engine.native.decoder import NativeDecoder
from baton.engine.sharding import Shard
from baton.engine.step_inputs import StepInputs
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence, step

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

DTYPES = ("float32", "bfloat16", "float16")
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def native_library() -> Path:
    path = build()
    assert path is not None
    return path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    path = tmp_path_factory.mktemp("llama")
    families.save_model("llama", path)
    return DecoderConfig.from_folder(path)


def heads(config: DecoderConfig, num_heads: int, num_kv_heads: int, head_dim: int) -> DecoderConfig:
    return dataclasses.replace(
        config, num_layers=NUM_LAYERS, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def noisy_pool(config: DecoderConfig, num_blocks: int, *, dtype: str = "float32", block_size: int = 16) -> KVPool:
    pool = KVPool(config.kv_layout(block_size, dtype), num_blocks)
    pool.tensor.normal_(generator=torch.Generator().manual_seed(3))
    return pool


def chunks(pool: KVPool, *spans: tuple[int, int]) -> BatchPlan:
    """Slices of (start, tokens), each with its own blocks in random order."""
    free = random.Random(4).sample(range(pool.num_blocks), pool.num_blocks)
    block_size = pool.layout.block_size
    return BatchPlan(
        slices=[
            SequenceSlice(
                attempt_id=str(number),
                token_ids=[0] * tokens,
                start_position=start,
                block_table=[free.pop() for _ in range(-(-(start + tokens) // block_size))],
                sampling=None,
            )
            for number, (start, tokens) in enumerate(spans)
        ]
    )


def queries_of(plan: BatchPlan, config: DecoderConfig) -> torch.Tensor:
    """Random ones, with a gap after each row as in the model's own tensor."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(plan.num_tokens, config.num_heads * config.head_dim + 7, generator=generator)
    shape = (plan.num_tokens, config.num_kv_heads, -1, config.head_dim)
    return rows[:, : config.num_heads * config.head_dim].unflatten(1, shape[1:])


def own_keys_values(plan: BatchPlan, pool: KVPool, layer: int) -> torch.Tensor:
    """What the pool holds for the step's own tokens."""
    rows = [
        pool.tensor[piece.block_table[position // pool.layout.block_size], layer, :, position % pool.layout.block_size]
        for piece in plan.slices
        for position in range(piece.start_position, piece.end_position)
    ]
    return torch.stack(rows)


def expected(
    plan: BatchPlan, config: DecoderConfig, pool: KVPool, *, window: int | None = None, layer: int = 1
) -> torch.Tensor:
    reference = AttentionPlan.build(plan, pool, window=window, dtype=torch.float32)
    return reference.run(queries_of(plan, config), own_keys_values(plan, pool, layer), pool, layer)


def computed(
    kernel: ChunkKernels,
    plan: BatchPlan,
    config: DecoderConfig,
    pool: KVPool,
    *,
    window: int | None = None,
    layer: int = 1,
) -> torch.Tensor:
    return kernel.plan(plan, pool, window).run(queries_of(plan, config), torch.empty(0), pool, layer)


# Ragged starts and ends around blocks, groups of 128 keys and tiles of 192 rows; several sequences in a step.
SPANS = ((0, 3), (0, 131), (5, 2), (127, 2), (126, 70), (250, 7), (300, 140), (17, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 128, 150])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 12), (8, 1, 80), (16, 2, 128)])
def test_attention_equals_that_of_torch(
    config: DecoderConfig, native_library: Path, dtype: str, window: int | None, shape: tuple[int, int, int]
) -> None:
    config = heads(config, *shape)
    pool = noisy_pool(config, 120, dtype=dtype)
    plan = chunks(pool, *SPANS)
    kernel = ChunkKernels(config, native_library, num_threads=2)
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(
            computed(kernel, plan, config, pool, window=window, layer=layer),
            expected(plan, config, pool, window=window, layer=layer),
            rtol=0.0,
            atol=3e-6,
        )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
@pytest.mark.parametrize("dtype", DTYPES)
def test_so_does_that_of_the_smallest_instruction_set(config: DecoderConfig, dtype: str) -> None:
    """Vectors of 4 lanes and no fused multiplication, where the machine's own code has other ones."""
    library = build(machine="-march=x86-64")
    assert library is not None
    config = heads(config, 6, 2, 20)
    pool = noisy_pool(config, 120, dtype=dtype)
    plan = chunks(pool, *SPANS)
    kernel = ChunkKernels(config, library, num_threads=2)
    for window in (None, 60):
        mixed = computed(kernel, plan, config, pool, window=window)
        torch.testing.assert_close(mixed, expected(plan, config, pool, window=window), rtol=0.0, atol=3e-6)


@pytest.mark.parametrize("block_size", [1, 3, 16, 200])
def test_any_block_size_will_do(config: DecoderConfig, native_library: Path, block_size: int) -> None:
    config = heads(config, 6, 2, 16)
    pool = noisy_pool(config, 1600 // block_size, block_size=block_size)
    plan = chunks(pool, (0, 150), (131, 60))
    kernel = ChunkKernels(config, native_library, num_threads=2)
    mixed = computed(kernel, plan, config, pool)
    torch.testing.assert_close(mixed, expected(plan, config, pool), rtol=0.0, atol=3e-6)


def test_more_query_heads_than_a_tile_has_rows_share_a_kv_head(config: DecoderConfig, native_library: Path) -> None:
    config = heads(config, 200, 1, 8)
    pool = noisy_pool(config, 20)
    plan = chunks(pool, (130, 5))
    kernel = ChunkKernels(config, native_library, num_threads=2)
    mixed = computed(kernel, plan, config, pool)
    torch.testing.assert_close(mixed, expected(plan, config, pool), rtol=0.0, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_lose_no_accuracy(config: DecoderConfig, native_library: Path, dtype: str) -> None:
    config = heads(config, 3, 1, 64)
    pool = noisy_pool(config, 2100, dtype=dtype)
    plan = chunks(pool, (32_700, 70))
    kernel = ChunkKernels(config, native_library, num_threads=2)
    piece = plan.slices[0]
    kept = pool.tensor[list(piece.block_table), 1].double()
    keys, values = kept.transpose(0, 1).flatten(1, 2)[:, : piece.end_position, 0]
    visible = torch.ones(70, piece.end_position, dtype=torch.bool).tril(piece.start_position)
    queries = queries_of(plan, config).double()[:, 0].transpose(0, 1)
    exact = scaled_dot_product_attention(queries, keys.expand(3, -1, -1), values.expand(3, -1, -1), attn_mask=visible)
    mixed = computed(kernel, plan, config, pool).view(70, 3, 64).transpose(0, 1)
    torch.testing.assert_close(mixed.double(), exact, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("window", [None, 150])
def test_a_row_has_the_same_bits_in_any_chunk_and_step_on_any_number_of_threads(
    config: DecoderConfig, native_library: Path, window: int | None
) -> None:
    config = heads(config, 9, 3, 64)
    pool = noisy_pool(config, 120, dtype="bfloat16")
    plan = chunks(pool, *SPANS)
    kernel = ChunkKernels(config, native_library, num_threads=2)
    whole = computed(kernel, plan, config, pool, window=window)
    queries = queries_of(plan, config)
    for num_threads in (1, 5, 2):
        kernel.use_threads(num_threads)
        assert torch.equal(computed(kernel, plan, config, pool, window=window), whole)
        row = 0
        for piece in plan.slices:
            for first in range(0, len(piece.token_ids), 45):
                tokens = piece.token_ids[first : first + 45]
                part = dataclasses.replace(piece, token_ids=tokens, start_position=piece.start_position + first)
                mixed = kernel.plan(BatchPlan(slices=[part]), pool, window).run(
                    queries[row : row + len(tokens)], torch.empty(0), pool, 1
                )
                assert torch.equal(mixed, whole[row : row + len(tokens)])
                row += len(tokens)


@pytest.mark.parametrize("window", [None, 20])
def test_only_keys_that_are_seen_are_touched(config: DecoderConfig, native_library: Path, window: int | None) -> None:
    """What others left in the rest of a block, or before a window, may be anything."""
    config = heads(config, 4, 2, 16)
    pool = noisy_pool(config, 40)
    plan = chunks(pool, (70, 9))
    kernel = ChunkKernels(config, native_library, num_threads=2)
    before = computed(kernel, plan, config, pool, window=window)
    first = 0 if window is None else 70 - window + 1
    seen = torch.zeros(40, 16, dtype=torch.bool)
    for position in range(first, 79):
        seen[plan.slices[0].block_table[position // 16], position % 16] = True
    pool.tensor[:, 1].transpose(1, 2)[~seen] = torch.nan
    assert torch.equal(computed(kernel, plan, config, pool, window=window), before)


def test_a_rank_reads_its_own_heads(config: DecoderConfig, native_library: Path) -> None:
    config = heads(config, 9, 3, 16)
    pool = noisy_pool(config, 120)
    plan = chunks(pool, *SPANS)
    kernel = ChunkKernels(config, native_library, num_threads=2)
    queries = queries_of(plan, config)
    whole = computed(kernel, plan, config, pool).unflatten(1, (3, -1))
    for rank, first, end in ((0, 0, 1), (1, 1, 3)):
        part = pool.part(Shard(rank, 2))
        mixed = kernel.plan(plan, part, None).run(queries[:, first:end].clone(), torch.empty(0), part, 1)
        assert torch.equal(mixed, whole[:, first:end].flatten(1))


def test_numbers_that_are_none_are_passed_on(config: DecoderConfig, native_library: Path) -> None:
    config = heads(config, 4, 2, 16)
    pool = noisy_pool(config, 40)
    plan = chunks(pool, (0, 9))
    pool.tensor[plan.slices[0].block_table[0], 1, :, 3] = torch.nan
    mixed = computed(ChunkKernels(config, native_library, num_threads=2), plan, config, pool)
    assert mixed[:3].isfinite().all()
    assert mixed[3:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", [(9, 3, 64), (8, 1, 6)])
def test_heads_are_rotated_and_written_as_by_torch(
    config: DecoderConfig, native_library: Path, dtype: str, has_norms: bool, shape: tuple[int, int, int]
) -> None:
    config = heads(config, *shape)
    pools = [noisy_pool(config, 120, dtype=dtype) for _ in range(2)]
    plan = chunks(pools[0], *SPANS)
    inputs = StepInputs.of(plan, pools[0].layout)
    generator = torch.Generator().manual_seed(8)
    angles = torch.randn(plan.num_tokens, config.head_dim // 2, generator=generator)
    rotary = angles.cos(), angles.sin()
    weights: Any = SimpleNamespace(query_norm=None, key_norm=None)
    if has_norms:
        weights.query_norm, weights.key_norm = torch.randn(2, config.head_dim, generator=generator).to(torch.bfloat16)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    given = torch.randn(plan.num_tokens, width, generator=generator)
    kernels = ChunkKernels(config, native_library, num_threads=2)
    reference = TorchHeads(config, rotary, inputs, pools[0]).run(given.clone(), weights, 1)
    for num_threads in (1, 2):
        kernels.use_threads(num_threads)
        queries, keys_values = kernels.plan_heads(rotary, inputs, pools[1]).run(given.clone(), weights, 1)
        torch.testing.assert_close(queries, reference[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(keys_values.to(reference[1].dtype), reference[1], rtol=1e-2, atol=1e-5)
        # What the pool holds is what was returned, rounded; the rest of it is as it was.
        view, rows = pools[0].positions_view(), inputs.pool_rows + 2 * pools[0].layout.block_size
        view[rows] = keys_values.reshape(-1, view.shape[1]).to(view.dtype)
        assert torch.equal(pools[1].tensor, pools[0].tensor)


def test_a_rank_writes_its_own_heads(config: DecoderConfig, native_library: Path) -> None:
    config = heads(config, 9, 3, 16)
    pools = [noisy_pool(config, 120) for _ in range(2)]
    plan = chunks(pools[0], *SPANS)
    part = dataclasses.replace(config, num_heads=6, num_kv_heads=2)
    angles = torch.randn(plan.num_tokens, 8)
    given = torch.randn(plan.num_tokens, 10 * 16)
    weights: Any = SimpleNamespace(query_norm=None, key_norm=None)
    inputs = StepInputs.of(plan, pools[0].layout)
    rotary = angles.cos(), angles.sin()
    shares = [pool.part(Shard(1, 2)) for pool in pools]
    TorchHeads(part, rotary, inputs, shares[0]).run(given.clone(), weights, 0)
    ChunkKernels(part, native_library, num_threads=2).plan_heads(rotary, inputs, shares[1]).run(given, weights, 0)
    torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-5, atol=1e-5)


def test_plans_are_run_in_turn(config: DecoderConfig, native_library: Path) -> None:
    """As when a short prompt is computed between two layers of a long one."""
    config = heads(config, 6, 2, 16)
    pool = noisy_pool(config, 120)
    kernel = ChunkKernels(config, native_library, num_threads=2)
    long, short = chunks(pool, (60, 130)), chunks(pool, (0, 30))
    plans = [kernel.plan(each, pool, None) for each in (long, short)]
    for layer in (0, 1):
        for each, plan in zip((long, short), plans, strict=True):
            mixed = plan.run(queries_of(each, config), torch.empty(0), pool, layer)
            assert torch.equal(mixed, computed(kernel, each, config, pool, layer=layer))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_step_of_every_family_equals_that_of_torch(name: str, native_library: Path, tmp_path: Path) -> None:
    families.save_model(name, tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32))
    kernel = ChunkKernels(config, native_library, num_threads=2)
    pools = [noisy_pool(config, 400, block_size=4) for _ in range(2)]
    plan = chunks(pools[0], *SPANS[:4])
    expected_hidden = DecoderModel(config, weights).hidden(plan, pools[0])
    hidden = DecoderModel(config, weights, kernels=kernel).hidden(plan, pools[1])
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[1].tensor, pools[0].tensor, rtol=1e-4, atol=1e-4)


def test_chunks_and_single_tokens_give_the_tokens_of_generate(native_library: Path, tmp_path: Path) -> None:
    families.save_model("qwen3-window", tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32))
    pool = noisy_pool(config, 400, block_size=4)
    model = DecoderModel(config, weights, kernels=ChunkKernels(config, native_library, num_threads=2))
    executor = TorchExecutor(model, pool, NativeDecoder(model, pool, library=native_library, num_threads=2))
    prompts = [random.Random(length).choices(range(families.SMALL["vocab_size"]), k=length) for length in (23, 150)]
    sequences = [Sequence(str(i), prompt, list(range(50 * i, 50 * i + 50))) for i, prompt in enumerate(prompts)]
    while len(sequences[1].tokens) < 8:
        step(executor, [(sequence, 40) for sequence in sequences if len(sequence.tokens) < 8])
    reference = families.reference_model(tmp_path)
    assert [sequence.tokens for sequence in sequences] == [
        families.reference_tokens(reference, prompt, 8) for prompt in prompts
    ]


def test_a_real_model_has_the_logits_of_torch(model_folder: Path, native_library: Path) -> None:
    config = DecoderConfig.from_folder(model_folder)
    weights = DecoderWeights.from_folder(model_folder, config, WeightForm(dtype=torch.bfloat16))
    pools = [KVPool(config.kv_layout(16, "bfloat16"), 20) for _ in range(2)]
    kernel = ChunkKernels(config, native_library, num_threads=2)
    models = [DecoderModel(config, weights), DecoderModel(config, weights, kernels=kernel)]
    tokens = random.Random(6).choices(range(config.vocab_size), k=60)
    for start, end in ((0, 40), (40, 60)):
        piece = dataclasses.replace(
            chunks(pools[0], (start, end - start)).slices[0], token_ids=tokens[start:end], block_table=range(20)
        )
        plan = BatchPlan(slices=[piece])
        logits = [model.logits(model.hidden(plan, pool)[-1:]) for model, pool in zip(models, pools, strict=True)]
        torch.testing.assert_close(logits[1], logits[0], rtol=0.0, atol=0.3)
