"""What a converted model folder says of its own files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.core.errors import StartupError
from baton.core.fingerprint import weight_files

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST_NAME = "baton-manifest.json"


class Manifest(BaseModel):
    """What a folder was made of and holds: SHA-256 of the source and, by name, of each file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_name: str
    source_sha256: str
    files: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest in `folder`; None when there is none that can be read."""
        try:
            return cls.model_validate_json((folder / MANIFEST_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def verify(self, folder: Path) -> bool:
        """Whether every file is there and as it was made. Reads them all; blocks for a second or so a GB."""
        return all(
            (folder / name).is_file() and file_sha256(folder / name) == sha256 for name, sha256 in self.files.items()
        )


def verify_weights(folder: Path) -> None:
    """Compares every byte of the weights in `folder` with the manifest, where there is one.

    Blocks for a second or so a GB. StartupError names the file that is not as it was made.
    """
    if not (folder / MANIFEST_NAME).exists():
        return
    manifest = Manifest.read(folder)
    if manifest is None:
        raise StartupError(f"{folder / MANIFEST_NAME}: is not a manifest; remove it to do without checksums")
    for file in weight_files(folder):
        expected = manifest.files.get(file.name)
        if expected is None:
            raise StartupError(f"{file}: {MANIFEST_NAME} does not know it; the folder was changed after it was made")
        try:
            found = file_sha256(file)
        except OSError as error:
            raise StartupError(f"{file}: {error.strerror}") from error
        if found != expected:
            raise StartupError(
                f"{file}: is damaged: its SHA-256 begins {found[:12]}, {MANIFEST_NAME} says {expected[:12]};"
                " make the folder again"
            )


def file_sha256(file: Path) -> str:
    """SHA-256 of the file's bytes, 64 hexadecimal digits. Blocks, without holding up other threads. OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
