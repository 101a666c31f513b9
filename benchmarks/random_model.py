"""Models of any size with random weights, for what depends on shapes alone."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEAD_DIM = 64


def save_random_llama(
    folder: Path, *, num_positions: int, hidden_size: int, num_layers: int, vocab_size: int = 49_152
) -> None:
    """Writes a Llama, the same each time, with heads of 64 and half as many KV heads as query heads. Blocks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    num_heads = max(1, hidden_size // HEAD_DIM)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        head_dim=HEAD_DIM,
        max_position_embeddings=num_positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Gives the model in `folder` the tokenizer of the one in `source`; their vocabularies must be of one size."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, folder / name)
