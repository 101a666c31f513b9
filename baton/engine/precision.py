"""Which element type a device computes well in."""

from __future__ import annotations

import torch


def resolve_dtype(dtype: str, device: str) -> str:
    """`dtype` itself, or for `auto` the fastest of the types that loses no accuracy worth naming.

    That is bfloat16 where the hardware multiplies it, else float32: without such instructions a CPU converts
    each element, and a batch in bfloat16 takes several times as long as in float32.
    """
    if dtype != "auto":
        return dtype
    kind = torch.device(device).type
    return "bfloat16" if (torch.cuda.is_bf16_supported(False) if kind == "cuda" else _cpu_has_bfloat16()) else "float32"


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
