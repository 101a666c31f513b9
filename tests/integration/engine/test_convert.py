"""The conversion, on a tiny GGUF file written here with known weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from baton.core.errors import StartupError
from baton.core.manifest import MANIFEST_NAME, Manifest
from baton.engine import convert as module
from baton.engine.convert import convert, main

ROOT = Path(__file__).parents[3]
HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 64, 4, 2, 96, 259
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def gpt2_bytes():
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(len(others))]


def known_weights():
    random = np.random.default_rng(0)
    head_dim = HIDDEN // HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * head_dim, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(file, architecture="llama"):
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Tiny Test Model")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", *gpt2_bytes(), "he"])
    writer.add_token_types([3, 3, *[1] * 257])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, values in known_weights().items():
        if "ffn" in name and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "tiny"
    convert(source, out)
    return out


@pytest.fixture
def out(converted, tmp_path):
    """A copy of a finished conversion, to be spoiled."""
    return Path(shutil.copytree(converted, tmp_path / "tiny"))


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def unpermuted(values, num_heads):
    """llama.cpp interleaves the halves of each rotary head; this puts them one after the other again."""
    return values.reshape(num_heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def test_the_weights_are_those_of_the_file(converted):
    known, made = known_weights(), load_file(converted / "model.safetensors")
    block = "model.layers.0"
    np.testing.assert_array_equal(made["model.embed_tokens.weight"], known["token_embd.weight"])
    np.testing.assert_array_equal(made["model.norm.weight"], known["output_norm.weight"])
    np.testing.assert_array_equal(made[f"{block}.self_attn.v_proj.weight"], known["blk.0.attn_v.weight"])
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        expected = unpermuted(known[f"blk.0.attn_{part}.weight"], heads)
        np.testing.assert_array_equal(made[f"{block}.self_attn.{part}_proj.weight"], expected)
    for part in ("gate", "up", "down"):
        kind = gguf.GGMLQuantizationType.Q8_0
        expected = dequantize(quantize(known[f"blk.0.ffn_{part}.weight"], kind), kind)
        np.testing.assert_array_equal(made[f"{block}.mlp.{part}_proj.weight"], expected)
    assert {tensor.dtype for tensor in made.values()} == {np.dtype("float32")}


def test_the_configuration_is_clean(converted):
    config = json.loads((converted / "config.json").read_text())
    expected = {"hidden_size": HIDDEN, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "num_key_value_heads": 2}
    assert config | expected == config
    assert config["rope_parameters"]["rope_theta"] == 12345.0
    for file in converted.glob("*.json"):
        if file.name != MANIFEST_NAME:
            assert (
                not {"_model_name_or_path", "_name_or_path", "name_or_path", "is_local"}
                & json.loads(file.read_text()).keys()
            )
    assert "Tiny Test Model" not in (converted / "config.json").read_text()


def test_the_tokenizer_and_the_chat_template_are_those_of_the_file(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    vocabulary = ["<s>", "</s>", *gpt2_bytes(), "he"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hey", add_special_tokens=False)) == ["he", "y"]
    assert tokenizer.encode("he!", add_special_tokens=False) == [vocabulary.index("he"), vocabulary.index("!")]
    assert (converted / "chat_template.jinja").read_text() == TEMPLATE
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=True, return_dict=False)
    assert chat == [0, vocabulary.index("he"), 1]
    assert tokenizer.model_max_length == 512


def test_all_files_are_readable_and_in_the_manifest(converted):
    names = {file.name for file in converted.iterdir()}
    assert Manifest.read(converted).files.keys() == names - {MANIFEST_NAME}
    assert {file.stat().st_mode & 0o777 for file in converted.iterdir()} == {0o644}
    assert converted.stat().st_mode & 0o777 == 0o755
    assert left_in(converted.parent) == ["tiny"]


def test_a_second_call_verifies_and_does_nothing(source, out):
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    lines = []
    assert convert(source, out, lines.append) == Manifest.read(out)
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    assert lines[-1] == f"{out} is complete already"


@pytest.mark.parametrize("spoil", [lambda file: file.write_bytes(b"x"), Path.unlink], ids=["changed", "missing"])
def test_a_spoilt_conversion_is_made_anew(source, out, spoil):
    spoil(out / "model.safetensors")
    assert convert(source, out).verify(out)
    assert left_in(out.parent) == ["tiny"]


def test_a_folder_of_somebody_else_is_left_alone(source, out):
    (out / MANIFEST_NAME).unlink()
    before = left_in(out)
    with pytest.raises(StartupError, match="exists and is not a conversion's"):
        convert(source, out)
    assert left_in(out) == before


def test_leftovers_of_a_killed_conversion_are_removed(source, out):
    leftover = out.parent / ".tiny.partial-abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    shutil.rmtree(out)
    convert(source, out)
    assert left_in(out.parent) == ["tiny"]


def test_an_interrupt_leaves_nothing(source, tmp_path):
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [sys.executable, "-m", "baton.engine.convert", str(source), str(folder / "tiny")]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            while "unpacking the weights" not in (line := process.stderr.readline()):
                assert line
            process.send_signal(signal.SIGINT)
            last_words = process.stderr.read()
        if process.returncode != 0:  # else it was done before the signal came
            break
    assert process.returncode == 130
    assert last_words.endswith("convert: interrupted; nothing was left behind\n")
    assert left_in(folder) == []


def damaged(source, tmp_path, kind):
    file = tmp_path / "broken.gguf"
    whole = source.read_bytes()
    content = {
        "empty": b"",
        "garbage": b"x" * 5000,
        "cut in the header": whole[:700],
        "cut in the data": whole[: len(whole) // 2],
        "one byte short": whole[:-1000],
    }
    file.write_bytes(content[kind])
    return file


@pytest.mark.parametrize("kind", ["empty", "garbage", "cut in the header", "cut in the data", "one byte short"])
def test_a_broken_file_is_one_line(source, tmp_path, capsys, kind):
    file = damaged(source, tmp_path, kind)
    assert main([str(file), str(tmp_path / "models" / "tiny")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"convert: {file}: is not a complete GGUF file"
    assert left_in(tmp_path / "models") == []


def test_an_unknown_architecture_is_one_line(tmp_path):
    file = write_gguf(tmp_path / "odd.gguf", architecture="oddity")
    with pytest.raises(StartupError, match=r"odd\.gguf: cannot be converted: .*oddity") as refusal:
        convert(file, tmp_path / "models" / "odd")
    assert "\n" not in str(refusal.value)
    assert left_in(tmp_path / "models") == []


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(StartupError, match=r"none\.gguf: there is no such file"):
        convert(tmp_path / "none.gguf", tmp_path / "out")


def test_a_full_disk_is_refused_before_the_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))
    with pytest.raises(StartupError, match="64 MiB are needed and 1 MiB are free"):
        convert(source, tmp_path / "models" / "tiny")
    assert left_in(tmp_path / "models") == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(source, tmp_path):
    """A real limit: the size of a file that the process may write."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    code = limit + "import sys; from baton.engine.convert import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "models" / "tiny")]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert os.strerror(errno.EFBIG) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert left_in(tmp_path / "models") == []


def test_two_conversions_at_a_time_give_one_folder(source, tmp_path):
    command = [sys.executable, "-m", "baton.engine.convert", str(source), str(tmp_path / "tiny")]
    pair = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert sorted("is complete already" in output for output in outputs) == [False, True]
    assert left_in(tmp_path) == ["tiny"]
    for output in outputs:  # and no progress bars or notes of the libraries
        assert "\r" not in output
        assert all(line.startswith("convert: ") for line in output.splitlines())
