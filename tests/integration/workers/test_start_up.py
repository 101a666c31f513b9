"""An engine's start finds weights out that would only cost requests later."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.core.manifest import MANIFEST_NAME
from baton.core.settings import EngineSettings, ModelSettings
from baton.engine.kv_pool import KVPool
from baton.worker.start_up import load

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def start(folder: Path) -> None:
    engine = EngineSettings(dtype="float32", kv_cache_bytes=1024**2, num_threads=torch.get_num_threads())
    load(ModelSettings(path=folder), engine, KVPool)


def test_weights_that_differ_from_the_manifest_are_refused_by_name(folder: Path) -> None:
    file = folder / "model.safetensors"
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    manifest = {"source_name": "x.gguf", "source_sha256": "0" * 64, "files": files}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    start(folder)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # the last tensor is small; its numbers stay finite
    file.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.safetensors: is damaged"):
        start(folder)


def test_weights_that_give_no_numbers_do_not_serve(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(StartupError, match="the first step failed: the model's logits are not finite"):
        start(folder)
