"""What a precision costs and what it gains: perplexity and greedy agreement with float32, bytes, decode rate.

The text is cut into windows. Half of each is computed as prompt chunks, the other half token by token with all windows
in one batch: so both of a worker's paths count, over the paged cache, with the kernels that serve.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan, ScoredIds, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.logprobs import logprobs_of
from baton.engine.model_config import DecoderConfig
from baton.engine.sizing import weight_bytes
from baton.engine.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# What a default may lose against float32; see docs/performance.md.
MAX_PERPLEXITY_INCREASE = 0.01
MIN_AGREEMENT = 0.95

WINDOW = 256
CHUNK = 64
BLOCK_SIZE = 16
RATE_BATCHES = (1, 16)
RATE_STEPS = 12
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Element type and quantization of an engine."""

    dtype: str
    quantization: str

    @property
    def name(self) -> str:
        """For people."""
        return self.dtype if self.quantization == "none" else f"{self.dtype}, {self.quantization} weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One precision on one text. `greedy` has the likeliest token after each that was scored.

    `tokens_per_s` has the decode rate at each of `RATE_BATCHES`, of the fastest step.
    """

    precision: Precision
    weight_bytes: int
    perplexity: float
    greedy: tuple[int, ...]
    tokens_per_s: dict[int, float]

    def perplexity_increase(self, reference: Reading) -> float:
        """As a share: 0.01 is a perplexity that is 1% higher."""
        return self.perplexity / reference.perplexity - 1

    def agreement(self, reference: Reading) -> float:
        """The share of positions at which both would choose the same token."""
        return sum(a == b for a, b in zip(self.greedy, reference.greedy, strict=True)) / len(self.greedy)

    def is_tolerable(self, reference: Reading) -> bool:
        """Whether the loss is within the thresholds."""
        return (
            self.perplexity_increase(reference) <= MAX_PERPLEXITY_INCREASE
            and self.agreement(reference) >= MIN_AGREEMENT
        )


def read(folder: Path, token_ids: Sequence[int], precision: Precision, device: str) -> Reading:
    """Loads the model in `folder` and measures it on a text of at least a window. Blocks. Raises StartupError."""
    config = DecoderConfig.from_folder(folder)
    length = min(WINDOW, config.max_positions)
    windows = [token_ids[start : start + length] for start in range(0, len(token_ids) - length + 1, length)]
    layout = config.kv_layout(BLOCK_SIZE, precision.dtype)
    num_tables = max(len(windows), *RATE_BATCHES)
    pool = KVPool(layout, num_tables * layout.blocks_for(length), device=device)
    executor = TorchExecutor.from_folder(folder, pool=pool, quantization=precision.quantization)
    text = _Text(executor, windows, layout.blocks_for(length))
    for row in range(len(windows)):
        text.score_prompt(row)
    for position in range(length // 2, length - 1):
        text.score_step(position)
    return Reading(
        precision=precision,
        weight_bytes=weight_bytes(config, element_bytes=layout.element_bytes, quantization=precision.quantization),
        perplexity=math.exp(-sum(text.logprobs) / len(text.logprobs)),
        greedy=tuple(text.greedy),
        tokens_per_s={size: size / text.step_s(size, length // 2) for size in RATE_BATCHES},
    )


class _Text:
    """The windows of a text as sequences of an executor, `num_blocks` blocks each."""

    def __init__(self, executor: TorchExecutor, windows: Sequence[Sequence[int]], num_blocks: int) -> None:
        self.logprobs: list[float] = []
        self.greedy: list[int] = []
        self._executor = executor
        self._windows = windows
        self._num_blocks = num_blocks

    def score_prompt(self, row: int) -> None:
        """The first half of a window, in chunks."""
        window = self._windows[row]
        end = len(window) // 2
        for start in range(0, end, CHUNK):
            stop = min(start + CHUNK, end)
            scored = ScoredIds(token_ids=window[start + 1 : stop + 1], top=1)
            piece = self._slice(row, window[start:stop], start, scored)
            for each in self._executor.execute(BatchPlan(slices=[piece])).prompt_logprobs[piece.attempt_id]:
                self.logprobs.append(each.logprob)
                self.greedy.append(each.top[0][0])

    def score_step(self, position: int) -> None:
        """The token at `position` of all windows, in one decode step."""
        plan = BatchPlan(slices=[self._slice(row, [w[position]], position) for row, w in enumerate(self._windows)])
        following = [window[position + 1] for window in self._windows]
        for each in logprobs_of(self._executor.logits(plan), following, [1] * len(following)):
            self.logprobs.append(each.logprob)
            self.greedy.append(each.top[0][0])

    def step_s(self, num_seqs: int, position: int) -> float:
        """Seconds of the fastest of some decode steps of so many sequences."""
        token = self._windows[0][position]
        plan = BatchPlan(slices=[self._slice(row, [token], position) for row in range(num_seqs)])
        times_s = []
        for _ in range(RATE_STEPS):
            start_s = time.perf_counter()
            self._executor.execute(plan)
            times_s.append(time.perf_counter() - start_s)
        return min(times_s)

    def _slice(self, row: int, token_ids: Sequence[int], start: int, scored: ScoredIds | None = None) -> SequenceSlice:
        return SequenceSlice(
            attempt_id=str(row),
            token_ids=token_ids,
            start_position=start,
            block_table=range(row * self._num_blocks, (row + 1) * self._num_blocks),
            sampling=_GREEDY if scored is None else None,
            scored=scored,
        )
