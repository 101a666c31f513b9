"""What is computed of a model's memory, against files, pools and steps."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from baton.core.generation import SamplingParams
from baton.engine.attention import TorchAttention
from baton.engine.batch import BatchPlan, ScoredIds, SequenceSlice
from baton.engine.int8_weight import Int8Weight
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import compiler
from baton.engine.sampler import torch_race
from baton.engine.sizing import StepShape, count_parameters, step_bytes, weight_bytes
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families

if TYPE_CHECKING:
    from pathlib import Path

# A step allocates at most what is computed, and at least this part of it.
LEAST_SHARE = 0.55

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MISTRAL_7B = LLAMA_8B | {"model_type": "mistral", "vocab_size": 32_000, "sliding_window": 4096}
QWEN2_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def stored_parameters(folder: Path) -> int:
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            total += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_parameters_are_those_in_the_files(name, tmp_path):
    families.save_model(name, tmp_path)
    assert count_parameters(DecoderConfig.from_folder(tmp_path)).total == stored_parameters(tmp_path)


def test_parameters_of_the_real_model(model_folder):
    counted = count_parameters(DecoderConfig.from_folder(model_folder))
    assert counted.total == stored_parameters(model_folder) == 134_515_008
    assert counted.head == 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama-biased", "llama-tied", "qwen3"])
def test_bytes_of_weights_are_those_that_are_loaded(name, quantization, tmp_path):
    families.save_model(name, tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.bfloat16, quantization=quantization))

    def bytes_of(value) -> int:
        if isinstance(value, torch.Tensor | Int8Weight):
            return value.nbytes
        if isinstance(value, tuple):
            return sum(map(bytes_of, value))
        if is_dataclass(value):
            return sum(bytes_of(getattr(value, field.name)) for field in fields(value))
        return 0

    loaded = bytes_of(weights) - (bytes_of(weights.head) if config.tied_embeddings else 0)
    assert weight_bytes(config, element_bytes=2, quantization=quantization) == loaded


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
    ],
    ids=["Llama-3-8B", "Mistral-7B", "Qwen2.5-7B", "Qwen3-8B"],
)
def test_a_bare_configuration_gives_the_published_number(config, published, tmp_path):
    file = tmp_path / "some-config.json"
    file.write_text(json.dumps(config))
    assert count_parameters(DecoderConfig.from_folder(file)).total == published


def test_kv_bytes_are_those_of_a_pool(model_folder):
    layout = DecoderConfig.from_folder(model_folder).kv_layout(16, "bfloat16")
    pool = KVPool(layout, 3)
    assert layout.block_bytes * 3 == pool.tensor.numel() * pool.tensor.element_size()
    assert layout.block_bytes // 16 == 23_040


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory) -> Path:
    """The shapes of the real model in two layers: a profiled step of all of them takes ten seconds."""
    folder = tmp_path_factory.mktemp("two-layers")
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def executor(request, two_layers) -> TorchExecutor:
    layout = DecoderConfig.from_folder(two_layers).kv_layout(16, request.param)
    made = TorchExecutor.from_folder(two_layers, pool=KVPool(layout, 160))
    # The kernels' memory is not PyTorch's, so only PyTorch's steps can be measured.
    made._decoder, made._race = None, torch_race
    made.warm_up()
    return made


def measured_bytes(executor: TorchExecutor, *slices: SequenceSlice) -> int:
    """The most memory that PyTorch held at a time during a step, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        executor.execute(BatchPlan(slices=slices))
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def piece(name: str, num_tokens: int, start: int, first_block: int = 0) -> SequenceSlice:
    return SequenceSlice(
        attempt_id=name,
        token_ids=[5] * num_tokens,
        start_position=start,
        block_table=range(first_block, first_block + -(-(start + num_tokens) // 16)),
        sampling=SamplingParams(seed=3, top_p=0.9),
    )


def without_kernels(executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = executor.model
    monkeypatch.setattr(model, "_kernels", None)
    monkeypatch.setattr(model, "_products", None)
    monkeypatch.setattr(model, "attention", TorchAttention(torch.float32))


def assert_near(executor: TorchExecutor, shape: StepShape, *slices: SequenceSlice) -> None:
    computed = step_bytes(executor.model.config, executor.layout, shape, on_cpu=True).with_cache(shape.num_keys)
    assert LEAST_SHARE * computed <= measured_bytes(executor, *slices) <= computed


@pytest.mark.parametrize(
    ("num_tokens", "start", "num_scored"), [(128, 0, 0), (128, 2000, 0), (300, 900, 0), (80, 0, 64)]
)
@pytest.mark.parametrize("by_kernels", [True, False], ids=["kernels", "torch"])
def test_a_prefill_step_takes_what_is_computed(executor, num_tokens, start, num_scored, by_kernels, monkeypatch):
    if not by_kernels:
        without_kernels(executor, monkeypatch)
    elif compiler() is None:
        pytest.skip("no C compiler")
    shape = StepShape(
        num_tokens=num_tokens,
        num_sampled=1,
        num_scored=num_scored,
        num_keys=num_tokens + start,
        is_decode=False,
        by_kernels=by_kernels,
    )
    chunk = piece("a", num_tokens, start)
    if num_scored:
        chunk = replace(chunk, scored=ScoredIds(token_ids=[5] * num_tokens, top=5))
    assert_near(executor, shape, chunk)


def test_a_decode_step_takes_what_is_computed(executor, monkeypatch):
    without_kernels(executor, monkeypatch)
    shape = StepShape(num_tokens=8, num_sampled=8, num_scored=0, num_keys=8 * 301, is_decode=True, by_kernels=False)
    assert_near(executor, shape, *(piece(f"a{index}", 1, 300, index * 20) for index in range(8)))
