"""Every system that is compared, with what is chosen for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.environments import python_of
from benchmarks.systems.baton import running_baton
from benchmarks.systems.peer import running_peer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from benchmarks.systems.system import System

MODEL = Path(".cache/models/SmolLM2-135M-Instruct")
# What the sample model has. Enough for every prompt that is sent to a peer.
MODEL_POSITIONS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A system by name. `num_threads` is for peers, `settings` for Baton (environment variables)."""

    kind: str
    name: str
    dtype: str = "float32"
    num_threads: int = 2
    arguments: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    model: Path = MODEL

    def start(self) -> AbstractAsyncContextManager[System]:
        """Yields the running system. CannotRunError when it does not run here."""
        threads = ("--threads", str(self.num_threads))
        model = ("--model", str(self.model.absolute()), "--dtype", self.dtype)
        positions = ("--max-model-len", str(MODEL_POSITIONS))
        match self.kind:
            case "baton":
                return running_baton(self.name, self.model, self.settings)
            case "transformers":
                return self._peer(Path(sys.executable), *model, *threads)
            case "vllm":
                return self._peer(python_of("vllm"), *model, *threads, *positions)
            case "llama_cpp":
                return self._peer(python_of("llama_cpp"), *threads, *positions)
            case kind:
                raise AssertionError(kind)

    def _peer(self, python: Path, *arguments: str) -> AbstractAsyncContextManager[System]:
        return running_peer(self.name, python, f"serve_{self.kind}", (*arguments, *self.arguments))


BATON = Choice(kind="baton", name="baton")
BATON_INT8 = Choice(kind="baton", name="baton int8", dtype="int8", settings={"BATON_ENGINE__QUANTIZATION": "int8"})
TRANSFORMERS = Choice(kind="transformers", name="transformers")
LLAMA_CPP = Choice(kind="llama_cpp", name="llama.cpp Q4_1", dtype="q4_1")
VLLM = Choice(kind="vllm", name="vLLM")
VLLM_TUNED = Choice(
    kind="vllm",
    name="vLLM tuned",
    arguments=("--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256"),
)
