"""What quantized weights are. Imports no torch.

`int8`: every matrix (projections, head, embeddings) is kept as whole numbers of -127 to 127 in groups of `GROUP`
neighbours along its inputs, with a bfloat16 scale a group. Norms and biases stay as they are.
"""

from __future__ import annotations

# Mirrored by native/linear.h.
GROUP = 64
SCALE_BYTES = 2


def num_groups(in_features: int) -> int:
    """Groups of a row of `in_features`; the last one is filled up with zeros."""
    return -(-in_features // GROUP)


def matrix_bytes(out_features: int, in_features: int, *, quantization: str, element_bytes: int) -> int:
    """Bytes that a matrix takes; `element_bytes` are those of the engine's dtype."""
    if quantization == "int8":
        return out_features * num_groups(in_features) * (GROUP + SCALE_BYTES)
    return out_features * in_features * element_bytes
