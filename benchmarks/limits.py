"""What this machine can do at most: measured in the run that compares with it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

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
    """Reads memory with all threads: call it to read `READ_BYTES` once."""

    def __init__(self) -> None:
        self._data = torch.ones(READ_BYTES // 4, dtype=torch.float32)

    def __call__(self) -> None:
        """Reads once."""
        self._data.sum()


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
        self.num_weight_bytes = sum(weight.nbytes for _, weight in self._work)

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
