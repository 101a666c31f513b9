"""The draw of tokens on a CPU by the project's own kernel."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class NativeRace:
    """Draws what `baton.engine.sampler.torch_race` does, and takes the same; on the caller's thread, blocking."""

    def __init__(self, library: Path) -> None:
        self._race = ctypes.CDLL(str(library)).baton_race
        self._race.argtypes, self._race.restype = [c_void_p, c_int64, c_uint64], c_int64

    def __call__(self, probabilities: torch.Tensor, keys: Sequence[int]) -> list[int]:
        """The row's winner for each key. Releases the interpreter's lock while a row is searched."""
        assert probabilities.dtype == torch.float32, "the kernel reads float32"
        assert probabilities.is_contiguous(), "rows follow each other"
        vocab_size = probabilities.shape[1]
        first, row_bytes = probabilities.data_ptr(), vocab_size * probabilities.itemsize
        return [self._race(first + row * row_bytes, vocab_size, key) for row, key in enumerate(keys)]
