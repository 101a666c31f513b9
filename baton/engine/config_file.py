"""A model folder's config.json, and what of it the engine refuses by name. Imports no torch, so it is told at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from baton.core.errors import StartupError
from baton.core.fingerprint import refuse_gguf
from baton.engine.checkpoint import stored_method

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def read_config(path: Path) -> dict[str, Any]:
    """`path`/config.json, or `path` itself if it is a file, as it stands there. Blocks for a small file.

    Raises StartupError naming the feature or fault that stops the engine and shows without computing anything.
    """
    raw = _read_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise StartupError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    _refuse_unsupported(path, raw)
    stored_method(path, raw)
    return raw


def _read_json(path: Path) -> dict[str, Any]:
    file = path if path.is_file() else path / "config.json"
    refuse_gguf(path)
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise StartupError(f"model.path: cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise StartupError(f"{file}: not a JSON object")
    return raw


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    """Raises for what transformers would accept and this decoder would silently compute wrongly."""
    architectures = raw.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        raise StartupError(f"{path}: architecture {architectures[0]} does not generate text")
    if raw.get("hidden_act", "silu") != "silu":
        raise StartupError(f"{path}: hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    if raw.get("model_type") == "mistral" and raw.get("layer_types") is not None:
        raise StartupError(f"{path}: layer_types of mistral models are not supported")
