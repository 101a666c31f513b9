"""What this machine can do at most: measured in the run that compares with it."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from baton.engine.native.build import compiler
from benchmarks.statistics import median

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.model_config import DecoderConfig

# Far more than any cache holds.
READ_BYTES = 512 * 1024 * 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the same work, repeated. `best_s` is what it takes; the rest is what else the machine did."""

    samples_s: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """The least."""
        return min(self.samples_s)

    @property
    def median_s(self) -> float:
        """The median."""
        return median(self.samples_s)

    @property
    def n(self) -> int:
        """How often it was measured."""
        return len(self.samples_s)


def in_turn(works: Sequence[Callable[[], object]], rounds: int) -> list[Times]:
    """Times several works A B C A B C ..., so that a machine that gets slower gets slower for all; one unkept round."""
    samples: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for kept, work in zip(samples, works, strict=True):
            seconds = timed(work)
            if number > 0:
                kept.append(seconds)
    return [Times(tuple(each)) for each in samples]


class MemoryRead:
    """Reads memory with all threads: call it to read `READ_BYTES` once.

    PyTorch's reductions reach little more than half of the machine's rate, so this is compiled where a compiler is.
    """

    def __init__(self, num_threads: int) -> None:
        self._data = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self._num_threads = num_threads
        self._read = _compiled_read()

    def __call__(self) -> None:
        """Reads once."""
        if self._read is None:
            self._data.sum()
        else:
            self._read(self._data.data_ptr(), READ_BYTES // 8, self._num_threads)


def _compiled_read() -> Callable[[int, int, int], int] | None:
    path = compiler()
    if path is None:
        return None
    source = Path(__file__).with_name("memory_read.c")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        library = Path(folder) / "memory_read.so"
        command = [path, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        read: Any = ctypes.CDLL(str(library)).read_memory
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_uint64
    return read  # type: ignore[no-any-return]


class LinearLayers:
    """All of a decoder's linear layers on `num_rows` rows and the head on `num_head_rows`, nothing between them.

    Weights of one layer are as large as the model's, and every layer has its own: what is read is what a step reads.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, num_rows: int, num_head_rows: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes = [(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)]
        self._work = [
            (torch.randn(num_rows, shape[1], dtype=dtype), torch.randn(*shape, dtype=dtype))
            for _ in range(config.num_layers)
            for shape in shapes
        ]
        head = torch.randn(config.vocab_size, hidden, dtype=dtype)
        self._work.append((torch.randn(num_head_rows, hidden, dtype=dtype), head))

    def __call__(self) -> None:
        """Computes once."""
        with torch.inference_mode():
            for rows, weight in self._work:
                linear(rows, weight)


class SquareProduct:
    """One large matrix product: what the arithmetic units reach at best."""

    SIZE = 1536

    def __init__(self, dtype: torch.dtype) -> None:
        self._left, self._right = (torch.randn(self.SIZE, self.SIZE, dtype=dtype) for _ in range(2))

    def __call__(self) -> None:
        """Computes once."""
        torch.mm(self._left, self._right)

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.SIZE**3
