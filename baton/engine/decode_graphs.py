"""Decode steps that are recorded once and replayed: CUDA graphs, for a few numbers of rows.

A replay launches what was recorded, on the same memory, without Python between the layers. So a step is written into
buffers that stay where they are, and its number of rows is filled up to one that was recorded. The rows that fill it up
compute something harmless in a block that no sequence has.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.staging import Staging
from baton.engine.step_inputs import NUMBERS_A_TOKEN, StepInputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.attention import StepAttention
    from baton.engine.flashinfer_attention import FlashInferAttention, RecordableAttention
    from baton.engine.kv_pool import KVPool
    from baton.engine.model import DecoderModel

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """What records work on a device."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """Runs `work`, and returns its result and what computes that anew, in place, from the memory that it reads.

        Nothing that `work` decides on the host is decided again. Raises what PyTorch raises when it can't be recorded.
        """
        ...


class CudaRecorder:
    """Implements `Recorder` by CUDA graphs on the current device. They share one pool of memory: use one at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """See `Recorder.record`."""
        # Once without recording: libraries make their handles and choose their kernels at the first call.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = work()
        return output, graph.replay


@dataclass(frozen=True, slots=True)
class _Recording:
    attention: RecordableAttention
    logits: torch.Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """Steps of at most `max_rows` single tokens, all of which sample.

    The pool's last block is this object's own: `num_usable_blocks` are left for sequences, one at least. Used from one
    thread, by which the model's other steps run too.
    """

    def __init__(
        self, model: DecoderModel, pool: KVPool, attention: FlashInferAttention, recorder: Recorder, max_rows: int
    ) -> None:
        assert pool.num_blocks > 1, "one block is kept for rows that only fill up"
        self.sizes = batch_sizes(max_rows)
        self.num_usable_blocks = pool.num_blocks - 1
        self._model = model
        self._pool = pool
        self._attention = attention
        self._recorder = recorder
        self._staging = Staging(pool.device)
        self._numbers = torch.zeros(NUMBERS_A_TOKEN * max_rows, dtype=torch.int64, device=pool.device)
        self._filling = SequenceSlice(
            attempt_id="filling",
            token_ids=(0,),
            start_position=0,
            block_table=(self.num_usable_blocks,),
            sampling=None,
        )
        self._recordings: dict[int, _Recording] = {}

    def record(self) -> None:
        """Records every size. Blocks for seconds. Raises what libraries raise if that can't be; then nothing is."""
        began_s = time.monotonic()
        recordings: dict[int, _Recording] = {}
        # The largest first: the others find room in its memory.
        for size, attention in sorted(self._attention.recordable(self.sizes).items(), reverse=True):
            recordings[size] = self._record(size, attention)
        self._recordings = recordings
        took_s = time.monotonic() - began_s
        _log.info("decode steps recorded: %d sizes up to %d rows in %.1f s", len(self.sizes), self.sizes[-1], took_s)

    def takes(self, plan: BatchPlan) -> bool:
        """Whether this can compute the step."""
        return 0 < len(plan.slices) <= max(self._recordings, default=0) and all(
            len(piece.token_ids) == 1 and piece.sampling is not None and piece.scored is None for piece in plan.slices
        )

    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """The float32 logits [slices, vocab_size] of a step that it takes, good until the next. Enqueued only."""
        num_rows = len(plan.slices)
        size = next(size for size in self.sizes if size >= num_rows)
        recording = self._recordings[size]
        self._write(self._filled_up(plan, size), recording.attention)
        recording.replay()
        return recording.logits[:num_rows]

    def _record(self, size: int, attention: RecordableAttention) -> _Recording:
        inputs, planned = self._write(self._filled_up(BatchPlan(slices=()), size), attention)

        def work() -> torch.Tensor:
            with torch.inference_mode():
                return self._model.logits(self._model.run_layers(inputs, planned, self._pool))

        return _Recording(attention, *self._recorder.record(work))

    def _write(
        self, plan: BatchPlan, attention: RecordableAttention
    ) -> tuple[StepInputs, dict[int | None, StepAttention]]:
        """Puts a step into the buffers that the recordings read, and returns these."""
        numbers = self._numbers[: NUMBERS_A_TOKEN * len(plan.slices)]
        self._staging.upload(StepInputs.of(plan, self._pool.layout).flat(), into=numbers)
        return StepInputs.over(numbers), self._model.plan_attention(plan, self._pool, attention)

    def _filled_up(self, plan: BatchPlan, size: int) -> BatchPlan:
        return BatchPlan(slices=[*plan.slices, *[self._filling] * (size - len(plan.slices))])


def batch_sizes(max_rows: int) -> list[int]:
    """Numbers of rows to record: powers of two, the halves between them, and the largest. At most a third is filling.

    Each costs memory and time at the start; decode steps cost little more for some rows that nobody reads.
    """
    powers = [1 << exponent for exponent in range(max_rows.bit_length())]
    sizes = {*powers, *(power + power // 2 for power in powers[1:]), max_rows}
    return sorted(size for size in sizes if size <= max_rows)
