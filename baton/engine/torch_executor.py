"""The executor that runs a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.core.errors import ResourceExhaustedError, StartupError
from baton.core.generation import SamplingParams
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.kv_pool import torch_dtype
from baton.engine.logits import apply_rules
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.native.decoder import NativeDecoder
from baton.engine.sampler import sample
from baton.engine.weights import DecoderWeights

if TYPE_CHECKING:
    from pathlib import Path

    from baton.core.model import KVLayout
    from baton.engine.kv_pool import KVPool


class TorchExecutor:
    """Runs steps of a decoder over a pool. Implements `Executor`; used from one thread, keeps no sequence state.

    With a `decoder`, slices of one token go to it, and only longer ones to PyTorch.
    """

    def __init__(self, model: DecoderModel, pool: KVPool, decoder: NativeDecoder | None = None) -> None:
        self._model = model
        self._decoder = decoder
        self._pool = pool
        self.layout: KVLayout = pool.layout
        self.num_blocks = pool.num_blocks
        self.vocab_size = model.config.vocab_size
        self.max_context_tokens = model.config.max_positions

    @classmethod
    def from_folder(cls, path: Path, *, pool: KVPool, device: str = "cpu") -> TorchExecutor:
        """Loads the model in `path`, in the dtype of `pool`, which the caller made with this model's layout.

        Blocks for the load. The number of threads is the process's (`torch.set_num_threads`). Raises StartupError.
        """
        config = DecoderConfig.from_folder(path)
        expected = config.kv_layout(pool.layout.block_size, pool.layout.dtype)
        if pool.layout != expected:
            raise StartupError(f"{path}: needs KV blocks of {expected}, the pool has {pool.layout}")
        if pool.device.type != torch.device(device).type:
            raise StartupError(f"device: the model is to run on {device}, its KV blocks are on {pool.device}")
        weights = DecoderWeights.from_folder(path, config, dtype=torch_dtype(pool.layout.dtype), device=device)
        model = DecoderModel(config, weights)
        return cls(model, pool, NativeDecoder.create(model, pool))

    def execute(self, plan: BatchPlan) -> list[int | None]:
        """Runs the step; see `Executor.execute`."""
        plan.assert_fits(block_size=self.layout.block_size, num_blocks=self.num_blocks)
        if not plan.slices:
            return []
        try:
            return self._sample(self._forward(plan), plan)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _too_large(plan) from error
        except RuntimeError as error:
            # The CPU allocator has no exception of its own.
            if "DefaultCPUAllocator" not in str(error):
                raise
            raise _too_large(plan) from error

    def warm_up(self) -> None:
        """Runs a prefill and a decode step in block 0, and a sampled row; see `Executor.warm_up`."""
        num_tokens = min(self.layout.block_size, self.max_context_tokens) - 1
        prompt, sampling = [0] * max(num_tokens, 1), SamplingParams()
        for token_ids, start in ((prompt, 0), ([0], num_tokens)):
            piece = SequenceSlice(
                attempt_id="warm-up", token_ids=token_ids, start_position=start, block_table=[0], sampling=sampling
            )
            self.execute(BatchPlan(slices=[piece]))

    def _forward(self, plan: BatchPlan) -> torch.Tensor:
        """Logits [slices that sample, vocab_size] in the plan's order."""
        if self._decoder is None:
            return self._model.forward(plan, self._pool)
        singles = [piece for piece in plan.slices if len(piece.token_ids) == 1]
        if len(singles) == len(plan.slices):
            return self._decoder.forward(plan)
        if not singles:
            return self._model.forward(plan, self._pool)
        chunks = [piece for piece in plan.slices if len(piece.token_ids) > 1]
        from_singles = self._decoder.forward(BatchPlan(slices=singles))
        from_chunks = self._model.forward(BatchPlan(slices=chunks), self._pool)
        is_single = torch.tensor([len(piece.token_ids) == 1 for piece in plan.slices if piece.sampling is not None])
        logits = torch.empty(len(is_single), self.vocab_size)
        logits[is_single] = from_singles
        logits[~is_single] = from_chunks
        return logits

    def _sample(self, logits: torch.Tensor, plan: BatchPlan) -> list[int | None]:
        tokens: list[int | None] = [None] * len(plan.slices)
        rows = [index for index, piece in enumerate(plan.slices) if piece.sampling is not None]
        if not rows:
            return tokens
        params = [piece.sampling for piece in plan.slices if piece.sampling is not None]
        adjusted = apply_rules(logits, [plan.slices[index].rules for index in rows])
        chosen = sample(adjusted, params, [plan.slices[index].end_position for index in rows])
        for index, token in zip(rows, chosen, strict=True):
            tokens[index] = token
        return tokens


def _too_large(plan: BatchPlan) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"a step of {plan.num_tokens} tokens does not fit into memory: lower max_num_batched_tokens",
        reason="OUT_OF_MEMORY",
        retry_after_s=None,
    )
