"""Every byte of the weights counts where a manifest says what it should be."""

from __future__ import annotations

import hashlib
import json
import struct

import pytest

from baton.core.errors import StartupError
from baton.core.fingerprint import weights_fingerprint
from baton.core.manifest import MANIFEST_NAME, verify_weights

NUM_BYTES = 1024 * 1024


@pytest.fixture
def folder(tmp_path):
    header = json.dumps({"w": {"dtype": "U8", "shape": [NUM_BYTES], "data_offsets": [0, NUM_BYTES]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(NUM_BYTES)
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    files = {"model.safetensors": hashlib.sha256(content).hexdigest()}
    manifest = {"source_name": "x.gguf", "source_sha256": "0" * 64, "files": files}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
    return tmp_path


def flip(file, offset):
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\1")


def test_a_byte_that_no_sample_of_the_fingerprint_has_is_seen(folder):
    verify_weights(folder)
    before = weights_fingerprint(folder)
    flip(folder / "model.safetensors", NUM_BYTES // 2)
    assert weights_fingerprint(folder) == before
    with pytest.raises(StartupError, match=r"model\.safetensors: is damaged") as refusal:
        verify_weights(folder)
    assert "\n" not in str(refusal.value)


def test_without_a_manifest_nothing_is_asked(folder):
    (folder / MANIFEST_NAME).unlink()
    flip(folder / "model.safetensors", NUM_BYTES // 2)
    verify_weights(folder)


def test_weights_that_were_put_into_the_folder_later_are_named(folder):
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    with pytest.raises(StartupError, match=rf"other\.safetensors: {MANIFEST_NAME} does not know it"):
        verify_weights(folder)


def test_a_manifest_that_is_none_is_named(folder):
    (folder / MANIFEST_NAME).write_text("{}")
    with pytest.raises(StartupError, match=rf"{MANIFEST_NAME}: is not a manifest"):
        verify_weights(folder)
