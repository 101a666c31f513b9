"""An engine's start finds out what would only cost requests later: weights, and memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from baton.core.errors import StartupError
from baton.core.manifest import MANIFEST_NAME
from baton.core.settings import EngineSettings, ModelSettings
from baton.core.workers import WorkerRole
from baton.engine.host_copy import KVMemory
from baton.engine.host_needs import HostNeeds
from baton.engine.kv_pool import KVPool
from baton.engine.memory_limit import host_memory
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import compiler
from baton.engine.rank_hardware import ranks_on
from baton.telemetry.instruments import WorkerInstruments
from baton.worker import start_up
from baton.worker.metrics import LoadMetrics
from baton.worker.settings import WorkerSettings
from baton.worker.start_up import Loaded, RankHost, load

if TYPE_CHECKING:
    from pathlib import Path

    from baton.core.model import KVLayout


def _no_ranks(_: int) -> None:
    raise AssertionError("a worker of one process has no ranks")


ALONE = RankHost(watch=_no_ranks, at_end=ExitStack(), hardware=ranks_on("cpu"))


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


def memory_of(layout: KVLayout, num_blocks: int) -> KVMemory:
    return KVMemory(pool=KVPool(layout, num_blocks))


def start(folder: Path, *, max_context_tokens: int | None = None, **engine: Any) -> Loaded:
    fields = {"dtype": "float32", "kv_cache_bytes": 1024**2, "num_threads": torch.get_num_threads()} | engine
    model = ModelSettings(path=folder, max_context_tokens=max_context_tokens)
    settings = WorkerSettings(model=model, engine=EngineSettings(**fields))
    return load(WorkerRole.DECODE, settings, memory_of, ALONE, needed=HostNeeds())


def test_an_engine_says_what_it_computes_with(folder: Path) -> None:
    facts = start(folder).facts
    assert (facts.device, facts.attention) == ("cpu", "torch" if compiler() is None else "native")
    registry = CollectorRegistry()
    LoadMetrics.of(WorkerInstruments(registry), facts)
    labels = {"device": "cpu", "dtype": "float32", "quantization": "none", "attention": facts.attention}
    assert registry.get_sample_value("baton_engine_info", labels) == 1


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


BOTH_ENGINES = """
import sys
sys.modules["torch"] = None  # to import it is an error
from types import SimpleNamespace
from baton.core.errors import StartupError
from decode_worker.engine_process import DecodeSpec, run_decode_engine
from decode_worker.settings import DecodeWorkerSettings
from prefill_worker.engine_process import PrefillSpec, run_prefill_engine
from prefill_worker.settings import PrefillWorkerSettings
flags, channel = ["--model.path", sys.argv[1]], SimpleNamespace(watch=None, wake=None)
prefill = PrefillSpec(settings=PrefillWorkerSettings.load(flags), incarnation="i", pair_key=b"")
decode = DecodeSpec(settings=DecodeWorkerSettings.load(flags))
for run, spec in ((run_prefill_engine, prefill), (run_decode_engine, decode)):
    try:
        run(channel, spec)
    except StartupError as error:
        print(error)
"""


@pytest.mark.parametrize("fault", ["config", "weights"])
def test_what_headers_show_is_told_before_torch_is_imported(folder: Path, fault: str) -> None:
    if fault == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    else:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes().replace(b'"shape":[48]', b'"shape":[47]'))
    run = [sys.executable, "-c", BOTH_ENGINES, str(folder)]
    lines = subprocess.run(run, capture_output=True, text=True, check=True, timeout=100).stdout.splitlines()
    words = {"config": "model_type 'mamba' is not supported", "weights": "is damaged: its header gives"}
    assert len(lines) == 2
    assert all(words[fault] in line for line in lines)


def test_weights_that_give_no_numbers_do_not_serve(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(StartupError, match="the first step failed: the model's logits are not finite"):
        start(folder)


def test_a_pool_that_the_memory_does_not_have_is_refused_before_anything_is_taken(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")  # no model: whoever loads it is refused
    with pytest.raises(StartupError, match=r"engine\.kv_cache_bytes: .* of KV blocks and .* are more than the"):
        start(folder, kv_cache_bytes=host_memory().usable_bytes)


def test_a_pool_below_the_context_that_is_set_is_refused_and_one_below_the_models_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(folder).facts.capacity_tokens < 4096
    assert "longer sequences are refused, though the model takes 4096" in caplog.text
    with pytest.raises(StartupError, match=r"model\.max_context_tokens: a sequence of 4000 tokens needs"):
        start(folder, max_context_tokens=4000)


def test_a_fraction_of_the_memory_sizes_the_pool(folder: Path) -> None:
    fraction = 0.05
    pool = start(folder, kv_cache_bytes=None, memory_fraction=fraction).memory.pool
    pool_bytes = pool.tensor.numel() * 4
    assert 0.5 * fraction * host_memory().total_bytes - (600 << 20) < pool_bytes
    assert pool_bytes < fraction * host_memory().total_bytes


def test_on_a_device_decode_steps_alone_are_to_be_recorded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pool is on a CPU, where that can't be: the log says so."""
    settings = WorkerSettings(model=ModelSettings(path=folder), engine=EngineSettings(device="cuda", num_threads=1))
    memory = memory_of(DecoderConfig.from_folder(folder).kv_layout(16, "float32"), 2)
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        assert not any("not recorded" in record.getMessage() for record in caplog.records)
        executor, _ = start_up._executor(role, settings, memory, 2, ALONE)
        assert executor.num_blocks == 2
    assert "decode steps are not recorded: PyTorch's attention" in caplog.records[-1].getMessage()
