"""config.json is read as transformers reads it, without transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoConfig

from baton.core.errors import StartupError
from baton.engine.model_config import DecoderConfig
from tests.integration.engine import families

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_2 = {  # as its own files have it: nothing of what came later
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
}
OLD_LLAMA3 = LLAMA_2 | {
    "rope_theta": 500_000.0,
    "num_key_value_heads": 8,
    "rope_scaling": {k: v for k, v in families.LLAMA3_ROPE.items() if k != "rope_theta"},
}
LINEAR = {"rope_theta": 20_000, "rope_scaling": {"type": "linear", "factor": 2.0}}
WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3, "num_hidden_layers": 5}
LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
CONFIGS = {
    "llama 2": LLAMA_2,
    "llama 3": OLD_LLAMA3,
    "linear": LLAMA_2 | LINEAR,
    "parameters": LLAMA_2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "scaling first": LLAMA_2 | LINEAR | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "whole factor": LLAMA_2 | {"partial_rotary_factor": 1.0},
    "biased": LLAMA_2 | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": None},
    **{f"bare {family}": {"model_type": family} for family in ("llama", "mistral", "qwen2", "qwen3")},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None, "head_dim": 64},
    "qwen2 with windows": {"model_type": "qwen2"} | WINDOWS,
    "qwen3 with windows that are off": {"model_type": "qwen3"} | WINDOWS | {"use_sliding_window": False},
    "qwen3 by layer": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9} | LAYER_TYPES,
    "qwen2 by layer": {"model_type": "qwen2"} | LAYER_TYPES,
    "qwen3 of all heads": {"model_type": "qwen3", "num_key_value_heads": None},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_means_what_it_means_to_transformers(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    found, expected = DecoderConfig.from_folder(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert (found.vocab_size, found.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (found.intermediate_size, found.num_layers) == (expected.intermediate_size, expected.num_hidden_layers)
    assert (found.num_heads, found.num_kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    assert (found.head_dim, found.rms_norm_eps) == (head_dim, expected.rms_norm_eps)
    assert (found.max_positions, found.tied_embeddings) == (
        expected.max_position_embeddings,
        expected.tie_word_embeddings,
    )
    assert found.mlp_bias == getattr(expected, "mlp_bias", False)
    assert found.output_bias == getattr(expected, "attention_bias", False)
    layer_types = getattr(expected, "layer_types", None)
    if expected.model_type == "llama":
        windows = [None] * expected.num_hidden_layers
    elif layer_types is None:
        windows = [expected.sliding_window] * expected.num_hidden_layers
    else:
        windows = [expected.sliding_window if each == "sliding_attention" else None for each in layer_types]
    assert list(found.sliding_windows) == windows
    if expected.rope_parameters["rope_type"] == "default":
        theta = expected.rope_parameters["rope_theta"]
        assert found.inv_freq == pytest.approx([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], rel=1e-5)
    else:
        plain = DecoderConfig.from_folder(_without_scaling(tmp_path, CONFIGS[name]))
        assert found.inv_freq != plain.inv_freq


def _without_scaling(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None, "rope_parameters": None}))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 4096.5}, r"config\.json: hidden_size: .*; it is 4096\.5"),
        ({"num_attention_heads": 0}, r"config\.json: num_attention_heads: .*greater than or equal to 1"),
        ({"tie_word_embeddings": None}, r"config\.json: tie_word_embeddings: "),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope parameters that differ from layer"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "odd"]}, "layer type 'odd' is not supported"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2 | changes))
    with pytest.raises(StartupError, match=message):
        DecoderConfig.from_folder(tmp_path)


def test_an_engine_needs_no_transformers(model_folder: Path) -> None:
    """It would take as long again as torch to import."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import baton.worker.start_up, baton.structure.compiler, baton.engine.group_executor\n"
        "from pathlib import Path; from baton.engine.torch_executor import TorchExecutor\n"
        "from baton.engine.model_config import DecoderConfig; DecoderConfig.from_folder(Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model_folder)], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
