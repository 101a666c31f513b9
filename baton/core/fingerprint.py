"""Short names for the contents of a model folder, the same on every host and in every process.

Two processes that hand over KV blocks, or send token ids to each other, compare these first. They guard against
mistakes, not against an adversary:

- `weights_fingerprint` differs for another checkpoint, fine-tune, quantization, shape, stored precision or
  configuration. Every tensor counts with its name, dtype, shape and evenly spaced samples of its bytes; a change
  that touches none of the samples of a big tensor, such as one flipped bit, is not seen. How tensors are spread over
  files, and their order, does not count.
- `tokenizer_fingerprint` differs whenever text could become other token ids or a chat other text: vocabulary,
  merges, normalizers, added tokens, special tokens, chat template. Formatting of the JSON files, where the
  folder lies and which library version wrote it do not count. Code next to the tokenizer is not looked at: it is
  never run.

Both block on file reads; neither reads a big file whole.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import StartupError
from baton.core.json_file import read_json_object, read_text

_DIGEST_CHARS = 32
_FORM = re.compile(rf"[0-9a-f]{{{_DIGEST_CHARS}}}")
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 * 1024 * 1024
# Of the usual types; what else there is, is left to the library that loads it.
_ELEMENT_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}
# Say where files came from or which library wrote them, and change with neither weights nor token ids.
_VOLATILE_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "use_cache"})
_VOLATILE_TOKENIZER_KEYS = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "is_local",
        "local_files_only",
        "name_or_path",
        "special_tokens_map_file",
        "tokenizer_file",
        "transformers_version",
    }
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `num_bytes` at `offset` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, sorted.

    Those that the index names, else `model.safetensors`, else every `*.safetensors`: what is fingerprinted, and
    all that is loaded. StartupError when there is none or one is missing.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index}: has no weight_map")
        files = sorted(folder / Path(str(name)).name for name in set(weight_map.values()))
    elif single.is_file():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StartupError(f"{folder}: no *.safetensors file")
    if missing := [file.name for file in files if not file.is_file()]:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise StartupError(f"{folder}: files named by the index are missing: {missing[0]}{others}")
    return files


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Every tensor of `files` by name, from their headers alone.

    StartupError names the file that is no safetensors file, is cut short, or repeats a tensor of another.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(file).items():
            if name in tensors:
                raise StartupError(f"{file}: holds {name}, and so does {tensors[name].file.name}")
            tensors[name] = tensor
    return tensors


def refuse_gguf(path: Path) -> None:
    """StartupError where `path` is a GGUF file, or a folder that has one and no config.json."""
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        raise StartupError(
            f"{files[0]} is a GGUF file, not a model folder: make one of it with "
            f"python -m baton.engine.convert {files[0]} FOLDER"
        )


def weights_fingerprint(folder: Path) -> str:
    """32 hexadecimal digits that stand for the configuration and the weights in `folder`. StartupError when
    they can't be read.
    """
    refuse_gguf(folder)
    digest = hashlib.sha256(b"baton weights 1\n")
    config = read_json_object(folder / "config.json")
    _add_json(digest, {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS})
    tensors = stored_tensors(weight_files(folder))
    descriptors: dict[Path, int] = {}
    try:
        for name in sorted(tensors):
            tensor = tensors[name]
            if tensor.file not in descriptors:
                descriptors[tensor.file] = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            _add_json(digest, [name, tensor.dtype, tensor.shape])
            for offset, num_bytes in _samples(tensor.num_bytes):
                digest.update(os.pread(descriptors[tensor.file], num_bytes, tensor.offset + offset))
    except OSError as error:
        raise StartupError(f"{folder}: {error.strerror}") from error
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return digest.hexdigest()[:_DIGEST_CHARS]


def tokenizer_fingerprint(folder: Path) -> str:
    """32 hexadecimal digits that stand for the tokenizer and chat template in `folder`. StartupError when they
    can't be read.
    """
    digest = hashlib.sha256(b"baton tokenizer 1\n")
    _add_json(digest, read_json_object(folder / "tokenizer.json"))
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_json_object(config_file) if config_file.is_file() else {}
    template: Any = config.pop("chat_template", None)
    if template_file.is_file():  # wins over the one in the configuration, as in transformers
        template = read_text(template_file)
    _add_json(digest, {key: value for key, value in config.items() if key not in _VOLATILE_TOKENIZER_KEYS})
    _add_json(digest, template)
    return digest.hexdigest()[:_DIGEST_CHARS]


def is_fingerprint(text: str) -> bool:
    """Whether `text` has the form of the fingerprints made here: 32 lower-case hexadecimal digits."""
    return _FORM.fullmatch(text) is not None


def _samples(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed of a tensor: all of a small one, else evenly spaced pieces, both ends in."""
    if num_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, num_bytes)]
    last = num_bytes - _SAMPLE_BYTES
    return [(last * index // (_SAMPLES - 1), _SAMPLE_BYTES) for index in range(_SAMPLES)]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; format: https://huggingface.co/docs/safetensors (8 bytes of length, JSON, data)."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
                raise StartupError(f"{file}: is not a complete safetensors file")
            entries = json.loads(stream.read(header_bytes))
        tensors = {
            name: StoredTensor(
                file=file,
                dtype=str(entry["dtype"]),
                shape=tuple(int(length) for length in entry["shape"]),
                offset=8 + header_bytes + int(entry["data_offsets"][0]),
                num_bytes=int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
            )
            for name, entry in entries.items()
            if name != "__metadata__"
        }
    except OSError as error:
        raise StartupError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise StartupError(f"{file}: is not a safetensors file") from error
    end = max((tensor.offset + tensor.num_bytes for tensor in tensors.values()), default=8 + header_bytes)
    if end != size:
        raise StartupError(f"{file}: has {size} bytes, and its header speaks of {end}; fetch it again")
    _require_whole(file, tensors, 8 + header_bytes)
    return tensors


def _require_whole(file: Path, tensors: dict[str, StoredTensor], start: int) -> None:
    """StartupError unless the tensors lie one after another from `start`, each as long as its shape and type say.

    The library that loads them wants the same, but it is there only after seconds.
    """
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].offset, each[1].num_bytes)):
        element_bits = _ELEMENT_BITS.get(tensor.dtype)
        is_sized = element_bits is None or math.prod(tensor.shape) * element_bits == tensor.num_bytes * 8
        if tensor.offset != start or not is_sized:
            raise StartupError(
                f"{file}: is damaged: its header gives {name} other bytes than those of {list(tensor.shape)}"
                f" {tensor.dtype} in their place; fetch it again"
            )
        start += tensor.num_bytes


def _add_json(digest: hashlib._Hash, value: object) -> None:
    """Adds `value` in one canonical form, ended so that neighbours can't flow into each other."""
    digest.update(json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n")
