"""Makes a model folder out of a GGUF file: `python -m baton.engine.convert SOURCE.gguf OUT_FOLDER`.

The quantized weights are unpacked to float32 safetensors, the configuration, tokenizer and chat template to the files
that transformers reads. The folder appears complete or not at all, with a manifest of checksums; a second call
verifies it and does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.core.errors import StartupError
from baton.core.manifest import MANIFEST_NAME, Manifest, file_sha256
from baton.engine.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Words of the conversion itself, not of the model.
_CONFIG_NOISE = ("_model_name_or_path", "_name_or_path")
_GENERATION_NOISE = ("_from_model_config", "output_attentions", "output_hidden_states")
_TOKENIZER_NOISE = ("is_local", "local_files_only", "name_or_path")
_HEADROOM_BYTES = 64 * 1024 * 1024


def convert(source: Path, out: Path, say: Callable[[str], None] = lambda line: None) -> Manifest:
    """Makes the model folder `out` from the GGUF file `source`, unless it is there and verifies.

    Blocks for half a minute and more, and needs memory for the weights in float32. `say` is told each step in a line.
    A folder of an older or damaged conversion is replaced; one that this function did not make is left alone.
    Raises StartupError, one line, and leaves nothing behind.
    """
    out = out.absolute()
    if not source.is_file():
        raise StartupError(f"{source}: there is no such file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _sole_use(out.parent, say):
            return _convert_alone(source, out, say)
    except OSError as error:
        raise StartupError(f"{error.filename or out}: {error.strerror or error}") from error


def _convert_alone(source: Path, out: Path, say: Callable[[str], None]) -> Manifest:
    say(f"checking {source.name}")
    source_sha256 = file_sha256(source)
    manifest = Manifest.read(out)
    if manifest and manifest.source_sha256 == source_sha256 and manifest.verify(out):
        say(f"{out} is complete already")
        return manifest
    if manifest is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out}: exists and is not a conversion's; name another folder or remove it")
    _check_source(source, out.parent)
    prefix = f".{out.name}.partial-"
    for leftover in out.parent.glob(f"{prefix}*"):  # of a conversion that was killed
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        _write_model(source, partial, say)
        say("writing checksums")
        files = {file.name: _finish(file) for file in sorted(partial.iterdir())}
        manifest = Manifest(source_name=source.name, source_sha256=source_sha256, files=files)
        (partial / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n")
        _finish(partial / MANIFEST_NAME)
        partial.chmod(0o755)
        _put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{out} is complete")
    return manifest


def _check_source(source: Path, parent: Path) -> None:
    """Refuses what is no whole GGUF file, and a disk that the result would not fit on."""
    if missing := [name for name in ("gguf", "accelerate", "transformers") if importlib.util.find_spec(name) is None]:
        raise StartupError(f"reading GGUF files needs {', '.join(missing)}; install baton-serving[local]")
    from gguf import GGUFReader

    try:
        num_elements = sum(int(tensor.n_elements) for tensor in GGUFReader(source).tensors)
    except Exception as error:  # whatever the parser trips over in a foreign file
        raise StartupError(f"{source}: is not a complete GGUF file") from error
    wanted_bytes, free_bytes = 4 * num_elements + _HEADROOM_BYTES, shutil.disk_usage(parent).free
    if wanted_bytes > free_bytes:
        raise StartupError(f"{parent}: {wanted_bytes >> 20} MiB are needed and {free_bytes >> 20} MiB are free")


def _write_model(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Fills `folder` with weights, configuration, tokenizer and chat template."""
    say("loading the converter")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place, options = str(source.parent), {"gguf_file": source.name, "local_files_only": True}
    try:
        say("unpacking the weights to float32")
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                place, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **options
            )
        say("writing the weights")
        with quiet():
            model.save_pretrained(folder)
        say("unpacking the tokenizer")
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            tokenizer.chat_template = _chat_template(source)
            tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # transformers and safetensors raise whatever they like
        text = " ".join(str(error).split())[:300]
        raise StartupError(f"{source}: cannot be converted: {text or type(error).__name__}") from error
    _clean(folder)


def _chat_template(source: Path) -> str | None:
    """The chat template as the GGUF file has it; None for a model without."""
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.chat_template")
    return None if field is None else str(field.contents())


def _clean(folder: Path) -> None:
    """Takes out what the conversion left in the JSON files."""
    config = _edit_json(folder / "config.json", _CONFIG_NOISE, {})
    limit = {"model_max_length": config["max_position_embeddings"]} if "max_position_embeddings" in config else {}
    _edit_json(folder / "tokenizer_config.json", _TOKENIZER_NOISE, limit)
    if (folder / "generation_config.json").exists():
        _edit_json(folder / "generation_config.json", _GENERATION_NOISE, {})


def _edit_json(file: Path, noise: tuple[str, ...], changes: dict[str, Any]) -> dict[str, Any]:
    values = {key: _plain_number(value) for key, value in json.loads(file.read_text()).items() if key not in noise}
    values |= changes
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    return values


def _plain_number(value: object) -> object:
    """1e-05 for 9.999999747378752e-06: the shortest number that is the same float32, which is what GGUF stores."""
    import numpy

    if isinstance(value, float) and float(numpy.float32(value)) == value:
        return float(str(numpy.float32(value)))
    return value


def _finish(file: Path) -> str:
    """Makes `file` readable for all and lasting; its SHA-256."""
    file.chmod(0o644)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return file_sha256(file)


def _put_in_place(partial: Path, out: Path) -> None:
    """Renames the finished folder to its name; an old conversion there makes way and is removed."""
    old = Path(f"{partial}-old")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _sole_use(parent: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps other conversions out of `parent` meanwhile, by a lock that ends with this process."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another conversion in {parent}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> int:
    """The command. Exit code 1 with one line on stderr when it fails, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m baton.engine.convert", description="GGUF to a model folder.")
    parser.add_argument("source", type=Path, metavar="SOURCE.gguf", help="the GGUF file; it is not changed")
    parser.add_argument("out", type=Path, metavar="OUT_FOLDER", help="the model folder to make")
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"convert: {time.monotonic() - started:5.1f} s  {line}", file=sys.stderr, flush=True)

    try:
        convert(options.source, options.out, say)
    except StartupError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("convert: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
