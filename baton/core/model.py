"""Facts about a served model that processes compare and tell each other."""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.core.errors import FailedPreconditionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """Which weights, tokenizer and numerics a process runs.

    `dtype` and `quantization` are empty where there are no weights. The latter is what the engine made of the weights
    when it loaded them, `none` or `int8`; a checkpoint that is stored quantized has other `weights`.
    """

    model: str
    weights: str
    tokenizer: str
    dtype: str
    quantization: str = "none"

    @property
    def numerics(self) -> tuple[str, str]:
        """What decides how numbers are rounded: the element type and the quantization."""
        return self.dtype, self.quantization

    def require_equal(self, other: ModelFingerprint, *, ours: str, theirs: str) -> None:
        """Raises FailedPreconditionError with both sides' values when a field that both know differs."""
        for field in fields(self):
            mine, his = getattr(self, field.name), getattr(other, field.name)
            if mine and his and mine != his:
                raise FailedPreconditionError(
                    f"{field.name} differs: {ours} has {mine}, {theirs} has {his}",
                    reason="FINGERPRINT_MISMATCH",
                    metadata={"field": field.name, "ours": mine, "theirs": his},
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How a KV pool lies in memory.

    A block is one contiguous [num_layers, 2 (key, value), block_size, num_kv_heads, head_dim] array, so a
    handover copies whole blocks.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * self.element_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)


def blocks_of_choices(num_prompt_tokens: int, num_output_tokens: int, num_choices: int, block_size: int) -> int:
    """Blocks of a prompt with several outputs of so many tokens each: they share those that the prompt fills."""
    num_shared = num_prompt_tokens // block_size
    return num_shared + num_choices * (-(-(num_prompt_tokens + num_output_tokens) // block_size) - num_shared)
