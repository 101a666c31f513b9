"""Checkpoints that are stored quantized: which are taken, and how they become plain weights.

transformers' own loaders unpack them to the element type of the engine, so they are served as if they had never been
quantized, at that type's size. Methods whose loaders keep the weights packed, for kernels of their own, are refused.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.errors import StartupError
from baton.engine.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

# By quant_method: the package that its loader needs besides transformers.
UNPACKED_BY = {"fp8": "accelerate", "compressed-tensors": "compressed_tensors"}


def stored_method(path: Path, raw_config: Mapping[str, Any]) -> str | None:
    """The method by which the checkpoint of this config.json is quantized; None for a plain one.

    Raises StartupError where the engine can't take it: it says what is missing and what to do instead.
    """
    described = raw_config.get("quantization_config")
    if described is None:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    if method not in UNPACKED_BY:
        raise StartupError(
            f"{path}: its weights are stored quantized ({method or 'by an unnamed method'}), and no loader"
            f" unpacks them: only those of {' and '.join(UNPACKED_BY)} are; serve the unquantized checkpoint, with "
            "engine.quantization int8 where memory is short"
        )
    package = UNPACKED_BY[method]
    if importlib.util.find_spec(package) is None:
        raise StartupError(
            f"{path}: its weights are stored quantized ({method}), and the package {package}, which unpacks them, is "
            f"not installed: pip install {package.replace('_', '-')}"
        )
    return str(method)


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: list[int]

    def get_shape(self) -> list[int]:
        return self.shape


class UnpackedTensors:
    """The plain weights of a quantized checkpoint, to be read like a safetensors file. All are in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype) -> UnpackedTensors:
        """Loads `path` in `dtype` through transformers. Blocks. StartupError when that fails or leaves weights out."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            with quiet():
                config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                config.quantization_config["dequantize"] = True
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    path, config=config, dtype=dtype, local_files_only=True, output_loading_info=True
                )
        except Exception as error:  # the loaders raise whatever they like
            text = " ".join(str(error).split())[:300]
            raise StartupError(f"{path}: cannot be unpacked: {text or type(error).__name__}") from error
        model, report = loaded
        for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, report[fault])):
                raise StartupError(f"{path}: cannot be unpacked: {fault.replace('_', ' ')}: {', '.join(names[:3])}")
        return cls(model.state_dict())

    def keys(self) -> Iterable[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name."""
        return self._tensors[name]

    def get_slice(self, name: str) -> _Shape:
        """What knows the tensor's shape."""
        return _Shape(list(self._tensors[name].shape))
