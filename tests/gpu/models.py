"""A small model of random weights with heads as large as the kernels want them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.engine.flashinfer_attention import FlashInferAttention
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 16
NUM_BLOCKS = 1025


def save_model(folder: Path, num_layers: int) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        # So that greedy choices stand out of the rounding of 16 bits.
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)


def executor_on_cuda(folder: Path) -> TorchExecutor:
    """With FlashInfer, which must be installed and work."""
    layout = DecoderConfig.from_folder(folder).kv_layout(BLOCK_SIZE, "bfloat16")
    executor = TorchExecutor.from_folder(folder, pool=KVPool(layout, NUM_BLOCKS, device="cuda"))
    assert isinstance(executor.model.attention, FlashInferAttention)
    return executor
