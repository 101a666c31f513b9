"""Folders load whole or are refused with the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.core.fingerprint import weights_fingerprint
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import WIDENED_ELEMENTS, DecoderWeights, Linear, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import GREEDY, Sequence, generate

if TYPE_CHECKING:
    from pathlib import Path


def executor(folder: Path, dtype: str = "float32") -> TorchExecutor:
    config = DecoderConfig.from_folder(folder)
    return TorchExecutor.from_folder(folder, pool=KVPool(config.kv_layout(4, dtype), 40))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.save_model("qwen2", tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_sharded_files_give_the_same_model(tmp_path: Path, folder: Path) -> None:
    sharded = tmp_path / "sharded"
    families.save_model("qwen2", sharded, shard=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    prompt = list(range(9))
    expected = generate(executor(folder), Sequence("a", prompt, list(range(9))), 12)
    assert generate(executor(sharded), Sequence("a", prompt, list(range(9))), 12) == expected


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    families.save_model("llama", tmp_path, shard=True)
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(StartupError, match="named by the index are missing: model-00002"):
        executor(tmp_path)


def test_what_is_loaded_is_what_the_fingerprint_is_of(folder: Path) -> None:
    """A second file beside `model.safetensors` counts for neither; before, its tensors replaced the model's."""
    prompt, before = list(range(9)), weights_fingerprint(folder)
    expected = generate(executor(folder), Sequence("a", prompt, list(range(9))), 12)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "zeros.safetensors")
    assert weights_fingerprint(folder) == before
    assert generate(executor(folder), Sequence("a", prompt, list(range(9))), 12) == expected


def edit_tensors(folder: Path, removed: tuple[str, ...] = (), added: dict[str, torch.Tensor] | None = None) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in removed} | (added or {})
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        (("model.layers.1.self_attn.k_proj.weight",), {}, r"layers\.1\.self_attn\.k_proj\.weight is missing"),
        (("lm_head.weight",), {}, r"lm_head\.weight is missing"),
        ((), {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, r"unexpected tensors for qwen2: .*q_norm"),
        ((), {"model.norm.weight": torch.ones(47)}, r"norm\.weight is \(47,\), config\.json implies \(48,\)"),
        ((), {"model.norm.weight": torch.ones(48, dtype=torch.int8)}, "quantized weights are not supported"),
    ],
)
def test_tensors_that_do_not_make_this_model_are_named(folder: Path, removed, added, message: str) -> None:
    edit_tensors(folder, removed, added)
    with pytest.raises(StartupError, match=message):
        executor(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "does not generate text"),
        ({"quantization_config": {"quant_method": "awq"}}, r"stored quantized \(awq\), and no loader unpacks them"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"stored quantized \(gptq\).*engine\.quantization int8",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, r"stored quantized \(by an unnamed method\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 KV heads"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"num_hidden_layers": "many"}, r"config\.json: "),
    ],
)
def test_features_that_are_not_supported_are_named(folder: Path, changes, message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(StartupError, match=message):
        executor(folder)


def test_folders_without_a_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json: No such file"):
        DecoderConfig.from_folder(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(StartupError, match="cannot read the weights"):
        executor(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"no \*\.safetensors file"):
        executor(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(StartupError, match="is not valid JSON"):
        DecoderConfig.from_folder(folder)


def test_a_pool_for_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    families.save_model("llama-head-dim", tmp_path / "other")
    layout = DecoderConfig.from_folder(tmp_path / "other").kv_layout(4, "float32")
    with pytest.raises(StartupError, match=r"head_dim=8.*the pool has .*head_dim=16"):
        TorchExecutor.from_folder(folder, pool=KVPool(layout, 4))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize("family", ["llama-biased", "qwen3-window"])
def test_half_precision_stays_close_to_float32(tmp_path: Path, family: str, dtype: str, bound: float) -> None:
    """Prefill in chunks and a decode step; `bound` is in parts of the spread of the logits."""
    families.save_model(family, tmp_path)
    tokens = list(range(3, 40))
    expected = families.reference_logits(families.reference_model(tmp_path), tokens)
    config = DecoderConfig.from_folder(tmp_path)
    pool = KVPool(config.kv_layout(4, dtype), 12)
    weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=getattr(torch, dtype)))
    model = DecoderModel(config, weights)
    for start, end in ((0, 11), (11, 36), (36, 37)):
        piece = SequenceSlice(
            attempt_id="a",
            token_ids=tokens[start:end],
            start_position=start,
            block_table=list(range(12)),
            sampling=GREEDY,
        )
        logits = model.forward(BatchPlan(slices=[piece]), pool)[0]
        assert logits.dtype == torch.float32
        error = (logits - expected[end - 1]).abs().max() / expected[end - 1].std()
        assert error < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 6, 40])
def test_widening_computes_the_same_map(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    in_features = WIDENED_ELEMENTS // 64
    weight, x = torch.randn(150, in_features).to(dtype), (torch.randn(rows, in_features) / 128).to(dtype)
    bias = torch.randn(150).to(dtype)
    expected = (x.double() @ weight.double().t() + bias.double()).to(dtype)
    for is_emulated in (False, True):
        actual = Linear(weight, bias, is_emulated)(x)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
