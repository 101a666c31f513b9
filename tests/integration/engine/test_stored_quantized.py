"""Checkpoints that are stored quantized are unpacked by transformers' loaders, or refused with the reason."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence, generate

if TYPE_CHECKING:
    from pathlib import Path

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
KEPT = ("embed_tokens", "lm_head", "norm")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def fp8_folder(tmp_path: Path) -> tuple[Path, Path]:
    """A folder in the format of public fp8 checkpoints, made here by its definition; and the same weights unpacked."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    for folder in (packed, plain):
        families.save_model("llama", folder)
    stored, unpacked = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = unpacked[name] = tensor
        if any(part in name for part in KEPT):
            continue
        rows, columns = tensor.shape
        blocks = tensor.view(rows // 16, 16, columns // 16, 16)
        scales = blocks.abs().amax((1, 3)) / 448.0
        stored[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
        stored[f"{name}_scale_inv"] = scales
        unpacked[name] = (stored[name].float().view(blocks.shape) * scales[:, None, :, None]).view(rows, columns)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    change_config(packed, quantization_config=FP8)
    return packed, plain


def tokens(folder: Path) -> list[int]:
    config = DecoderConfig.from_folder(folder)
    executor = TorchExecutor.from_folder(folder, pool=KVPool(config.kv_layout(4, "float32"), 20))
    return generate(executor, Sequence("a", list(range(5, 20)), list(range(12))), 16)


def test_an_fp8_checkpoint_is_served_like_its_unpacked_weights(fp8_folder: tuple[Path, Path]) -> None:
    packed, plain = fp8_folder
    config = DecoderConfig.from_folder(packed)
    assert config.stored_quantization == "fp8"
    made, expected = (
        DecoderWeights.from_folder(folder, DecoderConfig.from_folder(folder), WeightForm(dtype=torch.float32))
        for folder in fp8_folder
    )
    for mine, theirs in zip(made.layers, expected.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            torch.testing.assert_close(getattr(mine, name).weight, getattr(theirs, name).weight)
    assert tokens(packed) == tokens(plain)


def test_a_packed_checkpoint_without_its_scales_is_refused(fp8_folder: tuple[Path, Path]) -> None:
    packed, _ = fp8_folder
    tensors = load_file(packed / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "layers.1" not in name}, packed / "model.safetensors")
    with pytest.raises(StartupError, match=r"cannot be unpacked: missing keys: model\.layers\.1"):
        tokens(packed)


def test_a_loader_whose_package_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.save_model("llama", tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "compressed-tensors"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"\(compressed-tensors\).*: pip install compressed-tensors"):
        DecoderConfig.from_folder(tmp_path)


@pytest.mark.parametrize("place", ["model-q4.gguf", "."])
def test_a_gguf_file_is_no_model_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"q4\.gguf is a GGUF file, not a model folder.*baton\.engine\.convert"):
        DecoderConfig.from_folder(tmp_path / place)
