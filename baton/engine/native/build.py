"""Compiles the kernels with the machine's own C compiler, once for a machine, compiler and source."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from baton.core.start_up import LINE_PREFIX, LOGGER_NAME

_log = logging.getLogger(__name__)

COMPILED = ("decoder.c", "chunks.c", "race.c", "move.c")
HEADERS = (
    *("simd.h", "linear.h", "int8.h", "panels.h", "int8_panels.h", "products.h"),
    *("heads.h", "attention.h", "threads.h"),
)
SOURCES = (*HEADERS, *COMPILED)
COMPILERS = ("gcc", "cc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden")
COMPILE_TIMEOUT_S = 120.0


def compiler() -> str | None:
    """The path of a C compiler; None where the machine has none."""
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def build(folder: Path | None = None, *, machine: str = "-march=native") -> Path | None:
    """The compiled library, from `folder` (the user's cache) where an earlier call left it. Blocks.

    `machine` is the flag that chooses the instruction set. Returns None, and logs why in one line, where there is
    no compiler or it fails. Safe when several processes start at once.
    """
    path = compiler()
    if path is None:
        _log.warning("no C compiler (%s): steps run on PyTorch's kernels, slower", ", ".join(COMPILERS))
        return None
    try:
        folder = folder or cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        library = folder / f"kernels-{_key(path, machine)}.so"
        if not library.exists():
            _compile(path, library, machine)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        _log.warning("the kernels cannot be built, PyTorch's run instead, slower: %s", reason.split("\n")[0])
        return None
    return library


def cache_folder() -> Path:
    """Where compiled libraries are kept: `baton` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton"


def _key(compiler_path: str, machine: str) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(_source(name).read_bytes())
    version = subprocess.run([compiler_path, "--version"], capture_output=True, check=True, timeout=10).stdout
    for part in (version, " ".join(FLAGS).encode(), machine.encode(), _cpu()):
        digest.update(b"\0" + part)
    return digest.hexdigest()[:24]


def _cpu() -> bytes:
    """What tells processors apart whose native code differs."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    facts = [line for line in lines if line.startswith((b"flags", b"Features", b"model name", b"CPU part"))]
    return b"\n".join(sorted(set(facts))) or platform.processor().encode()


def _compile(compiler_path: str, library: Path, machine: str) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as scratch:
        made = Path(scratch) / library.name
        sources = [str(_source(name)) for name in COMPILED]
        command = [compiler_path, *FLAGS, machine, *sources, "-o", str(made), "-lm"]
        logging.getLogger(LOGGER_NAME).info("%scompile the kernels, once for this machine", LINE_PREFIX)
        subprocess.run(command, capture_output=True, check=True, text=True, timeout=COMPILE_TIMEOUT_S)
        made.replace(library)


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)
