"""Small models with random weights, one or more a family, made and answered by transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Weights of this spread make logits differ enough for greedy choices to be unambiguous.
    "initializer_range": 0.3,
}


def _llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))


def _mistral(**changes: Any) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**{**SMALL, **changes}))


def _qwen2(**changes: Any) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(**{**SMALL, **changes}))


def _qwen3(**changes: Any) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **changes}))


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

FAMILIES = {
    "llama": lambda: _llama(),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: _llama(head_dim=16, rms_norm_eps=1e-3),
    "llama-all-heads": lambda: _llama(num_key_value_heads=6),
    "llama-rope-llama3": lambda: _llama(rope_parameters=LLAMA3_ROPE),
    "llama-rope-yarn": lambda: _llama(rope_parameters=YARN_ROPE),
    "llama-rope-linear": lambda: _llama(rope_parameters=LINEAR_ROPE),
    "mistral": lambda: _mistral(sliding_window=None, head_dim=12),
    "mistral-window": lambda: _mistral(sliding_window=9),
    "mistral-window-of-blocks": lambda: _mistral(sliding_window=8),
    "qwen2": lambda: _qwen2(),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: _qwen3(head_dim=16),
    "qwen3-tied-biased": lambda: _qwen3(head_dim=8, attention_bias=True, tie_word_embeddings=True),
    "qwen3-window": lambda: _qwen3(head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=2),
}


def save_model(name: str, folder: Path, *, shard: bool = False) -> None:
    """Writes the family's model with random weights, biases and norms."""
    torch.manual_seed(sum(name.encode()))
    model = FAMILIES[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size="40KB" if shard else "1GB")


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in `folder` as transformers computes it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab_size] of one sequence, float32, computed in one pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def reference_tokens(model: Any, token_ids: list[int], count: int) -> list[int]:
    """What transformers' own greedy `generate` continues `token_ids` with."""
    prompt = torch.tensor([token_ids])
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
    continued: list[int] = output[0, len(token_ids) :].tolist()
    return continued
