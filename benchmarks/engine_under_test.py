"""Our executor and transformers' model, doing the same steps in one process."""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)


class BatonEngine:
    """A `TorchExecutor` over a pool of `num_blocks` blocks. Steps use the first blocks; contents do not matter."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        num_blocks: int,
        *,
        quantization: str = "none",
        storage: torch.Tensor | None = None,
    ) -> None:
        self.config = DecoderConfig.from_folder(folder)
        pool = KVPool(self.config.kv_layout(BLOCK_SIZE, dtype), num_blocks, storage=storage)
        self._executor = TorchExecutor.from_folder(folder, pool=pool, quantization=quantization)
        self._num_blocks = num_blocks
        self._has_own_products = self._executor.model.has_own_products

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads."""
        weights = self._executor.model.weights
        linears = [weights.head]
        for layer in weights.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
        return sum(linear.weight.nbytes for linear in linears)

    def prefill(self, num_tokens: int, start: int = 0) -> None:
        """One prompt in one chunk, or the chunk of it that begins at position `start`."""
        token_ids = [100 + index % 1000 for index in range(start, start + num_tokens)]
        table = range(-(-(start + num_tokens) // BLOCK_SIZE))
        self._execute([_slice("prompt", token_ids, start, table)])

    def decode_step(self, num_seqs: int, context_tokens: int) -> None:
        """One token for each of `num_seqs` sequences that have `context_tokens` tokens each.

        Their blocks lie spread over the whole pool, as they do after hours of service.
        """
        per_sequence = -(-(context_tokens + 1) // BLOCK_SIZE)
        stride = self._num_blocks // (num_seqs * per_sequence)
        assert stride > 0, "the pool is too small"
        tables = [[(row * per_sequence + index) * stride for index in range(per_sequence)] for row in range(num_seqs)]
        slices = [_slice(str(row), [100 + row], context_tokens, table) for row, table in enumerate(tables)]
        self._execute(slices)

    def _execute(self, slices: list[SequenceSlice]) -> None:
        with _pytorch_out_of_the_way() if self._has_own_products else nullcontext():
            self._executor.execute(BatchPlan(slices=slices))


class TransformersModel:
    """The same steps through transformers' own model and `generate`."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def prefill(self, num_tokens: int) -> None:
        """One prompt; logits of its last token only."""
        ids = torch.arange(num_tokens)[None] % 1000 + 100
        with torch.inference_mode():
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1)

    def decode_times_s(self, num_seqs: int, context_tokens: int, num_steps: int) -> list[float]:
        """Seconds of each step of `generate` after the one that reads the prompt."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        times_s: list[float] = []

        class Note(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
                times_s.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        ids = torch.arange(num_seqs * context_tokens).view(num_seqs, context_tokens) % 1000 + 100
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_steps + 1,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Note()]),
            )
        return [later - earlier for earlier, later in pairwise(times_s)]


@contextmanager
def _pytorch_out_of_the_way() -> Iterator[None]:
    """PyTorch's threads spin after each operation, on the cores of the kernels' threads.

    An engine process has them sleep (OMP_WAIT_POLICY), which would slow transformers down; so here they stay away.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _slice(name: str, token_ids: Sequence[int], start: int, table: Sequence[int]) -> SequenceSlice:
    return SequenceSlice(attempt_id=name, token_ids=token_ids, start_position=start, block_table=table, sampling=GREEDY)
