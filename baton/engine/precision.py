"""Which element type a device computes well in."""

from __future__ import annotations

import torch

from baton.core.errors import StartupError
from baton.engine.native.build import compiler


def resolve_dtype(dtype: str, device: str) -> str:
    """`dtype` itself, or for `auto` the fastest of the types that loses no accuracy worth naming.

    That is bfloat16 where the hardware multiplies it, and on a CPU also where decode steps run on this project's own
    kernels, which widen the weights in registers and keep everything between them in float32. Else float32: PyTorch
    alone converts each element, and a batch in bfloat16 takes several times as long. StartupError without the device.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"engine.device: {device} is not to be had: PyTorch finds no CUDA device here")
    if dtype != "auto":
        return dtype
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(False) else "float32"
    return "bfloat16" if has_bfloat16_products() or compiler() is not None else "float32"


def require_quantization(quantization: str, device: str, stored: str | None) -> None:
    """StartupError where weights can't be quantized at load: no kernels, or they are `stored` quantized already."""
    if quantization != "none" and stored is not None:
        raise StartupError(
            f"engine.quantization: {quantization} of weights that are stored quantized already ({stored}) would lose "
            "twice; use none, or the unquantized checkpoint"
        )
    if quantization != "none" and torch.device(device).type != "cpu":
        raise StartupError(
            f"engine.quantization: {quantization} has kernels for cpu only, not for {device}; "
            "use none, or engine.device cpu"
        )


def has_bfloat16_products() -> bool:
    """Whether the CPU multiplies bfloat16, so that PyTorch's own products are fastest in it."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
