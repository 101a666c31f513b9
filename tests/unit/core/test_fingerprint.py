from __future__ import annotations

import json
import re
import struct
import time

import pytest

from baton.core.errors import StartupError
from baton.core.fingerprint import (
    is_fingerprint,
    stored_tensors,
    tokenizer_fingerprint,
    weight_files,
    weights_fingerprint,
)

CONFIG = {"model_type": "llama", "hidden_size": 4, "transformers_version": "5.0", "_name_or_path": "here"}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}
BIG_BYTES = 4 * 1024 * 1024


def write_safetensors(file, tensors, *, metadata=None):
    """Writes {name: (dtype, shape, data)} by the format's specification, independently of any library."""
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(data for _, _, data in tensors.values()))


def tensors():
    return {
        "norm": ("F32", [4], bytes(range(16))),
        "embed": ("BF16", [2, BIG_BYTES // 4], bytes(BIG_BYTES)),
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b", "name_or_path": "here"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    write_safetensors(tmp_path / "model.safetensors", tensors())
    return tmp_path


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=4))


def test_fingerprints_are_32_hexadecimal_digits(folder):
    for fingerprint in (weights_fingerprint(folder), tokenizer_fingerprint(folder)):
        assert re.fullmatch("[0-9a-f]{32}", fingerprint)
        assert is_fingerprint(fingerprint)


@pytest.mark.parametrize("text", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, "a" * 32 + "\n"])
def test_what_has_another_form_is_no_fingerprint(text):
    assert not is_fingerprint(text)


def test_two_copies_have_one_fingerprint(folder, tmp_path_factory):
    before = weights_fingerprint(folder), tokenizer_fingerprint(folder)
    copy = folder.rename(tmp_path_factory.mktemp("moved") / "elsewhere")
    assert (weights_fingerprint(copy), tokenizer_fingerprint(copy)) == before


def test_shards_and_order_and_metadata_do_not_count(folder):
    before = weights_fingerprint(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(reversed(tensors().items())):
        write_safetensors(folder / f"part-{number}.safetensors", {name: tensor}, metadata={"format": "pt"})
        weight_map[name] = f"part-{number}.safetensors"
    assert weights_fingerprint(folder) == before
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "optimizer.safetensors").write_bytes(b"not part of the model")
    assert weights_fingerprint(folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"norm": ("F32", [4], bytes(16))},
        {"norm": ("F32", [2, 2], bytes(range(16)))},
        {"norm": ("I32", [4], bytes(range(16)))},
        {"extra": ("F32", [1], bytes(4))},
        {"embed": ("BF16", [2, BIG_BYTES // 4], b"\1" + bytes(BIG_BYTES - 1))},
        {"embed": ("BF16", [2, BIG_BYTES // 4], bytes(BIG_BYTES - 1) + b"\1")},
        {"embed": ("BF16", [2, BIG_BYTES // 4], bytes(BIG_BYTES // 2) + b"\1" * (BIG_BYTES // 2))},
    ],
    ids=["data", "shape", "dtype", "name", "first byte", "last byte", "half of a big tensor"],
)
def test_other_weights_have_another_fingerprint(folder, change):
    before = weights_fingerprint(folder)
    write_safetensors(folder / "model.safetensors", tensors() | change)
    assert weights_fingerprint(folder) != before


def test_configuration_counts_and_where_it_came_from_does_not(folder):
    before = weights_fingerprint(folder)
    edit_json(folder / "config.json", transformers_version="5.24", _name_or_path="there")
    assert weights_fingerprint(folder) == before
    edit_json(folder / "config.json", rope_parameters={"rope_theta": 1e5})
    assert weights_fingerprint(folder) != before


def test_big_files_are_not_read_whole(folder):
    """A sparse file of 64 GiB takes no longer than the headers and the samples."""
    size = 64 * 2**30
    header = json.dumps({"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + size)
    started = time.process_time()
    weights_fingerprint(folder)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}, "merges": [["a", "b"]]}}),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}),
        ("tokenizer_config.json", {"eos_token": "a"}),
    ],
)
def test_another_tokenizer_has_another_fingerprint(folder, file, change):
    before = tokenizer_fingerprint(folder)
    edit_json(folder / file, **change)
    assert tokenizer_fingerprint(folder) != before


def test_formatting_and_provenance_of_the_tokenizer_do_not_count(folder):
    before = tokenizer_fingerprint(folder)
    edit_json(folder / "tokenizer.json")
    edit_json(folder / "tokenizer_config.json", name_or_path="there", local_files_only=True)
    assert tokenizer_fingerprint(folder) == before


def test_the_effective_chat_template_counts_wherever_it_stands(folder):
    before = tokenizer_fingerprint(folder)
    edit_json(folder / "tokenizer_config.json", chat_template="overridden by the file")
    assert tokenizer_fingerprint(folder) == before
    (folder / "chat_template.jinja").unlink()
    assert tokenizer_fingerprint(folder) != before
    edit_json(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert tokenizer_fingerprint(folder) == before


def test_stored_tensors_say_where_the_bytes_lie(folder):
    (file,) = weight_files(folder)
    norm = stored_tensors([file])["norm"]
    assert file.read_bytes()[norm.offset : norm.offset + norm.num_bytes] == bytes(range(16))
    assert (norm.dtype, norm.shape) == ("F32", (4,))


def test_empty_tensors_and_types_that_are_not_known_here_are_taken(folder):
    odd = {"none": ("F32", [0, 3], b""), "nibbles": ("F4", [6], bytes(3)), "also none": ("BF16", [0], b"")}
    write_safetensors(folder / "model.safetensors", odd)
    assert stored_tensors(weight_files(folder)).keys() == odd.keys()


def damage_cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def damage_garbage(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{")


def damage_short(folder):
    (folder / "model.safetensors").write_bytes(b"abc")


def damage_length(folder):
    """Two tensors have each other's bytes."""
    norm, embed = tensors()["norm"], tensors()["embed"]
    write_safetensors(folder / "model.safetensors", {"norm": norm[:2] + embed[2:], "embed": embed[:2] + norm[2:]})


def damage_gap(folder):
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header["b"] = {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(12))


def damage_missing(folder):
    (folder / "model.safetensors").unlink()


def damage_index(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"norm": "part-7.safetensors"}}')


def damage_twice(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    write_safetensors(folder / "b.safetensors", tensors())


def damage_config(folder):
    (folder / "config.json").write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "has .* bytes, and its header speaks of"),
        (damage_garbage, "model.safetensors: is not a safetensors file"),
        (damage_short, "model.safetensors: is not a complete safetensors file"),
        (damage_length, r"is damaged: its header gives norm other bytes than those of \[4\] F32"),
        (damage_gap, r"is damaged: its header gives b other bytes than those of \[1\] F32 in their place"),
        (damage_missing, r"no \*\.safetensors file"),
        (damage_index, r"named by the index are missing: part-7\.safetensors"),
        (damage_twice, r"b\.safetensors: holds norm, and so does a\.safetensors"),
        (damage_config, "config.json: is not a JSON object"),
    ],
)
def test_damage_is_one_line_that_names_the_file(folder, damage, message):
    damage(folder)
    with pytest.raises(StartupError, match=message) as refusal:
        weights_fingerprint(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "tokenizer.json: No such file"), (b"\xff", "is not UTF-8"), (b"{", "is not valid JSON")],
)
def test_a_broken_tokenizer_is_one_line(folder, content, message):
    file = folder / "tokenizer.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(StartupError, match=message):
        tokenizer_fingerprint(folder)


@pytest.mark.parametrize("place", [".", "model-q4.gguf"])
def test_a_gguf_file_is_told_apart_and_how_to_convert_it(tmp_path, place):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"q4\.gguf is a GGUF file, not a model folder.*baton\.engine\.convert"):
        weights_fingerprint(tmp_path / place)
