"""The choice of tokens on a CPU by the project's own kernels."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class NativeRace:
    """Chooses what `baton.engine.sampler.TorchRace` does, and takes the same; on the caller's thread, blocking."""

    def __init__(self, library: Path) -> None:
        opened = ctypes.CDLL(str(library))
        self._race, self._largest = opened.baton_race, opened.baton_largest
        self._race.argtypes, self._race.restype = [c_void_p, c_int64, c_uint64], c_int64
        self._largest.argtypes, self._largest.restype = [c_void_p, c_int64, c_int64, c_void_p], None

    def largest(self, logits: torch.Tensor) -> list[int]:
        """See `Race`. Releases the interpreter's lock."""
        assert logits.dtype == torch.float32, "the kernel reads float32"
        logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        ids = array("q", bytes(8 * num_rows))
        self._largest(logits.data_ptr(), num_rows, vocab_size, ids.buffer_info()[0])
        return ids.tolist()

    def __call__(self, probabilities: torch.Tensor, keys: Sequence[int]) -> list[int]:
        """The row's winner for each key. Releases the interpreter's lock while a row is searched."""
        assert probabilities.dtype == torch.float32, "the kernel reads float32"
        assert probabilities.is_contiguous(), "rows follow each other"
        vocab_size = probabilities.shape[1]
        first, row_bytes = probabilities.data_ptr(), vocab_size * probabilities.itemsize
        return [self._race(first + row * row_bytes, vocab_size, key) for row, key in enumerate(keys)]
