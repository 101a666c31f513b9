"""The small files of a model folder. What is wrong with one is told in one line that names it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; StartupError when there is none. Blocks for a small file."""
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{file}: is not a JSON object")
    return value


def read_text(file: Path) -> str:
    """The text in a file; StartupError when it cannot be read. Blocks for a small file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"{file}: is not UTF-8 text") from error
    except OSError as error:
        raise StartupError(f"{file}: {error.strerror}") from error
