"""A model folder's config.json, and what of it the engine refuses by name.

Imports neither torch nor transformers, which take seconds, so what is wrong is told at once. The names and the
families' defaults are those of transformers, which writes these files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.core.errors import StartupError
from baton.core.fingerprint import refuse_gguf
from baton.core.json_file import read_json_object
from baton.engine.checkpoint import stored_method

if TYPE_CHECKING:
    from pathlib import Path

_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": {
        "vocab_size": 32_000,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
    "qwen3": {
        "vocab_size": 151_936,
        "intermediate_size": 22_016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    },
}
FAMILIES = tuple(_DEFAULTS)


class ConfigFile(BaseModel):
    """What config.json says of a model of one of `FAMILIES`, what it leaves out filled in.

    `stored_quantization` is the method by which the files are quantized, None for plain ones.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(default=4096, ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(default=32, ge=1)
    num_attention_heads: int = Field(default=32, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = Field(ge=1)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = Field(default=None, ge=1)
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    stored_quantization: str | None = None

    @property
    def rope(self) -> dict[str, Any]:
        """What there is to know of the rotary embedding, `rope_type` and `rope_theta` always, however it is stored."""
        stored = self.rope_scaling or self.rope_parameters or {}
        outside = {"rope_type": stored.get("type", "default"), "rope_theta": self.rope_theta}
        if self.partial_rotary_factor is not None:
            outside["partial_rotary_factor"] = self.partial_rotary_factor
        return outside | stored


def read_config(path: Path) -> ConfigFile:
    """Reads `path`/config.json, or `path` itself if it is a file. Blocks for a small file.

    Raises StartupError naming the feature or fault that stops the engine and shows without computing anything.
    """
    refuse_gguf(path)
    raw = read_json_object(path if path.is_file() else path / "config.json")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise StartupError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(path, raw)
    method = stored_method(path, raw)
    try:
        return ConfigFile.model_validate(_DEFAULTS[family] | raw | {"stored_quantization": method})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise StartupError(f"{path}: config.json: {name}: {first['msg']}; it is {first['input']!r}") from error


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    """Raises for what transformers would accept and this decoder would silently compute wrongly."""
    architectures = raw.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise StartupError(f"{path}: architecture {architectures[0]} does not generate text")
    if raw.get("hidden_act", "silu") != "silu":
        raise StartupError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("model_type") == "mistral" and raw.get("layer_types") is not None:
        raise StartupError(f"{path}: layer_types of mistral models are not supported")
