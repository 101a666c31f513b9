"""What the gateway knows of the model that it serves, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.core.errors import NotFoundError, StartupError
from baton.core.fingerprint import tokenizer_fingerprint, weights_fingerprint
from baton.core.json_file import read_json_object
from baton.core.model import ModelFingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from baton.core.settings import ModelSettings
    from gateway.tokenization import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model's name, contents and limits. The fingerprint has no numerics: the gateway holds no weights."""

    fingerprint: ModelFingerprint
    max_context_tokens: int
    default_max_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    longest_token_chars: int

    @property
    def name(self) -> str:
        """The name under which it is served."""
        return self.fingerprint.model

    def require_name(self, name: str) -> None:
        """Raises NotFoundError when a request names another model; no name means this one."""
        if name and name != self.name:
            raise NotFoundError(
                f"model: {name[:64]!r} is not served here; {self.name!r} is",
                reason="MODEL_NOT_FOUND",
                metadata={"field": "model"},
            )


def load_served_model(settings: ModelSettings, tokenizer: Tokenizer, *, default_max_tokens: int) -> ServedModel:
    """Reads the model folder's facts. Blocks on file reads; StartupError, one line, when they can't be used."""
    folder = settings.path
    config = read_json_object(folder / "config.json")
    # Models of text and more keep the decoder's facts one level deeper.
    text_config: dict[str, Any] = config.get("text_config") or config
    own_context = _positive(text_config, "max_position_embeddings", folder)
    max_context_tokens = settings.max_context_tokens or own_context
    if max_context_tokens > own_context:
        raise StartupError(f"model.max_context_tokens: {max_context_tokens} is over the model's own {own_context}")
    return ServedModel(
        fingerprint=ModelFingerprint(
            model=settings.name,
            weights=weights_fingerprint(folder),
            tokenizer=tokenizer_fingerprint(folder),
            dtype="",
            quantization="",
        ),
        max_context_tokens=max_context_tokens,
        default_max_tokens=default_max_tokens,
        vocab_size=_positive(text_config, "vocab_size", folder),
        eos_token_ids=_eos_token_ids(folder, text_config, tokenizer),
        has_chat_template=tokenizer.has_chat_template,
        longest_token_chars=tokenizer.longest_token_chars,
    )


def _eos_token_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> frozenset[int]:
    """The generation configuration's ids, else the model's, else the tokenizer's: transformers' order."""
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    for value in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{folder / 'config.json'}: {key} must be a positive whole number, it is {value!r}")
    return value
