"""What the decoder needs to know of a model folder, with everything it cannot do refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from baton.core.errors import StartupError
from baton.core.model import KVLayout
from baton.engine.config_file import read_config

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from baton.engine.config_file import ConfigFile
    from baton.engine.sharding import Shard

# The others change frequencies with a sequence's length, after keys were rotated and cached.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shapes and variants of one decoder-only model of the Llama family.

    `sliding_windows` has an entry a layer: how many positions, its own included, a token sees; None for all.
    `inv_freq` are the head_dim / 2 rotary frequencies with scaling applied, `rope_scale` the factor on cosine
    and sine. `stored_quantization` is the method by which the files are quantized, None for plain ones.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    inv_freq: tuple[float, ...]
    rope_scale: float
    stored_quantization: str | None = None

    @classmethod
    def from_folder(cls, path: Path) -> DecoderConfig:
        """Reads `path`/config.json, or `path` itself if it is a file. Blocks.

        Raises StartupError naming the feature or fault that stops it.
        """
        config = read_config(path)
        family, num_heads = config.model_type, config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_heads
        if num_heads % num_kv_heads:
            raise StartupError(f"{path}: {num_heads} query heads cannot share {num_kv_heads} KV heads")
        head_dim = config.head_dim or config.hidden_size // num_heads
        attention_bias = config.attention_bias and family in ("llama", "qwen3")
        inv_freq, rope_scale = _rope_frequencies(path, config.rope, head_dim)
        return cls(
            family=family,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            tied_embeddings=config.tie_word_embeddings,
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and config.mlp_bias,
            qk_norm=family == "qwen3",
            sliding_windows=_sliding_windows(path, config),
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            stored_quantization=config.stored_quantization,
        )

    def part(self, shard: Shard) -> DecoderConfig:
        """What one rank computes: fewer heads and inner features, the rest as it is.

        StartupError when there are more ranks than KV heads.
        """
        if shard.size > self.num_kv_heads:
            raise StartupError(
                f"engine.tensor_parallel_size: {shard.size} ranks cannot divide the {self.num_kv_heads} KV heads "
                f"of this model, at most {self.num_kv_heads} can"
            )
        num_kv_heads = shard.cut(self.num_kv_heads).count
        return replace(
            self,
            num_heads=self.num_heads // self.num_kv_heads * num_kv_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=shard.cut_features(self.intermediate_size).count,
        )

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """The layout of a KV pool for this model: known before any weight or pool is loaded."""
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def _sliding_windows(path: Path, config: ConfigFile) -> tuple[int | None, ...]:
    num_layers = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * num_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * num_layers
    window = config.sliding_window if config.use_sliding_window else None
    if config.layer_types is None:
        return tuple(window if layer >= config.max_window_layers else None for layer in range(num_layers))
    if len(config.layer_types) != num_layers:
        raise StartupError(f"{path}: layer_types has {len(config.layer_types)} entries for {num_layers} layers")
    if unknown := set(config.layer_types) - {"full_attention", "sliding_attention"}:
        raise StartupError(f"{path}: layer type {min(unknown)!r} is not supported")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in config.layer_types)


def _rope_frequencies(path: Path, rope: Mapping[str, Any], head_dim: int) -> tuple[tuple[float, ...], float]:
    rope_type = rope["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise StartupError(f"{path}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError(f"{path}: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; only 1 is")
    if any(isinstance(value, dict) for value in rope.values()):
        raise StartupError(f"{path}: rope parameters that differ from layer to layer are not supported")
    if rope_type == "default":
        return _default_frequencies(rope["rope_theta"], head_dim), 1.0
    return _scaled_frequencies(path, rope_type)


def _default_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """theta ** (-2i / head_dim) (Su et al., RoFormer); transformers keeps this one outside its table."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple((1.0 / (theta**exponents)).tolist())


def _scaled_frequencies(path: Path, rope_type: str) -> tuple[tuple[float, ...], float]:
    """Those of the types that stretch the default one, by transformers, which is imported for them alone: it takes
    as long again as torch.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        inv_freq, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    except Exception as error:  # transformers raises errors of many unrelated classes for a bad config
        reason = " ".join(str(error).split())
        raise StartupError(f"{path}: config.json: {reason}") from error
    return tuple(inv_freq.tolist()), float(scale)
