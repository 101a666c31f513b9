"""The decoder: one forward over a flat batch of tokens of any number of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import rms_norm, silu

from baton.engine.attention import TorchAttention, attention_dtype
from baton.engine.heads import TorchHeads
from baton.engine.staging import Staging
from baton.engine.step_inputs import StepInputs
from baton.engine.weights import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from baton.engine.attention import PagedAttention, StepAttention
    from baton.engine.batch import BatchPlan
    from baton.engine.heads import StepHeads
    from baton.engine.kv_pool import KVPool
    from baton.engine.model_config import DecoderConfig
    from baton.engine.native.chunks import ChunkKernels
    from baton.engine.rank_group import RankGroup
    from baton.engine.weights import DecoderWeights, LayerWeights, Linear


class DecoderModel:
    """A model of the Llama family whose keys and values live in a paged pool.

    Every linear layer runs once over all tokens of a step, prefill and decode together. Holds no state of any
    sequence. PyTorch computes all of it, or on a CPU `kernels` what they are for, where the caller has them; on a
    device `attention` is what computes that.

    In a `group` each rank has a model of its own with its part of the weights, and `config`, like the pool, is that
    part's. All ranks make the same calls in the same order and get the same results.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights,
        group: RankGroup | None = None,
        *,
        kernels: ChunkKernels | None = None,
        attention: PagedAttention | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self._group = group
        self._kernels = kernels
        self._device = weights.embeddings.device
        self._staging = None if self._device.type == "cpu" else Staging(self._device)
        # Where the weights have to be widened anyway, rounding between the layers would only cost time and accuracy.
        self._dtype = torch.float32 if weights.head.is_emulated else weights.dtype
        # The kernels multiply in float32; what PyTorch multiplies in a narrower type, it has instructions for.
        self._products = kernels if self._dtype == torch.float32 else None
        self.attention: PagedAttention = (
            attention or kernels or TorchAttention(attention_dtype(self._dtype, self._device))
        )
        self._inv_freq = torch.tensor(config.inv_freq, dtype=torch.float32, device=self._device)

    @property
    def has_own_products(self) -> bool:
        """Whether the linear layers are the kernels', with threads of their own."""
        return self._products is not None

    def use_threads(self, num_threads: int) -> None:
        """Has the kernels compute with so many threads; PyTorch's are the process's."""
        if self._kernels is not None:
            self._kernels.use_threads(num_threads)

    def forward(self, plan: BatchPlan, pool: KVPool) -> torch.Tensor:
        """Computes the step, writes its keys and values into the pool, and returns logits.

        Returns float32 [slices that sample, vocab_size], in the order of the plan; see `hidden`.
        """
        return self.sampled_logits(self.hidden(plan, pool), plan)

    def hidden(self, plan: BatchPlan, pool: KVPool, pause: Callable[[], None] | None = None) -> torch.Tensor:
        """Computes the step and writes its keys and values into the pool; returns what `logits` takes.

        Returns [tokens of the step, hidden_size]. Blocks until done on a CPU; on a GPU the result is enqueued. The
        plan must fit (`BatchPlan.assert_fits`); the pool must have this model's layout, dtype and device. `pause` is
        called before each layer but the first; other steps may run in it.
        """
        inputs = StepInputs.of(plan, pool.layout)
        if self._staging is not None:
            inputs = StepInputs.over(self._staging.upload(inputs.flat()))
        with torch.inference_mode():
            return self.run_layers(inputs, self.plan_attention(plan, pool, self.attention), pool, pause)

    def plan_attention(
        self, plan: BatchPlan, pool: KVPool, attention: PagedAttention
    ) -> dict[int | None, StepAttention]:
        """The step's attention by window, for all windows that layers have."""
        return {window: attention.plan(plan, pool, window) for window in set(self.config.sliding_windows)}

    def run_layers(
        self,
        inputs: StepInputs,
        attention: Mapping[int | None, StepAttention],
        pool: KVPool,
        pause: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """What `hidden` does, from tensors on the model's device alone. In inference mode."""
        heads = self._plan_heads(inputs, pool)
        # Contiguous, for rows of int8 have gaps where their last group is not whole.
        hidden = self._embed(inputs.token_ids).contiguous()
        for index, (layer, window) in enumerate(zip(self.weights.layers, self.config.sliding_windows, strict=True)):
            if pause is not None and index > 0:
                pause()
            queries, keys_values = heads.run(self._after_norm(layer.qkv, hidden, layer.input_norm), layer, index)
            mixed = attention[window].run(queries, keys_values, pool, index)
            self._add_linear(hidden, layer.output, mixed)
            self._add_mlp(hidden, layer)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, vocab_size] for rows of `hidden`."""
        with torch.inference_mode():
            logits = self._after_norm(self.weights.head, hidden, self.weights.final_norm).to(torch.float32)
            return logits if self._group is None else self._group.side_by_side(logits, self.config.vocab_size)

    def sampled_logits(self, hidden: torch.Tensor, plan: BatchPlan) -> torch.Tensor:
        """The logits after the last token of each slice that samples, in the order of the plan."""
        rows: list[int] = []
        end = 0
        for piece in plan.slices:
            end += len(piece.token_ids)
            if piece.sampling is not None:
                rows.append(end - 1)
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self._device)
        return self.logits(hidden if len(rows) == end else hidden[torch.tensor(rows, device=self._device)])

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size]: each rank looks up the tokens of its part of the vocabulary."""
        table = self.weights.embeddings
        if self._group is None:
            return rows_of(table, token_ids, self._dtype)
        rows = token_ids - self._group.shard.cut(self.config.vocab_size).first
        is_elsewhere = (rows < 0) | (rows >= table.shape[0])
        found = rows_of(table, rows.masked_fill(is_elsewhere, 0), self._dtype)
        return self._group.sum(found.masked_fill_(is_elsewhere[:, None], 0))

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of all ranks added up."""
        return x if self._group is None else self._group.sum(x)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.config.rms_norm_eps)

    def _plan_heads(self, inputs: StepInputs, pool: KVPool) -> StepHeads:
        angles = inputs.positions[:, None].to(torch.float32) * self._inv_freq
        scale = self.config.rope_scale
        rotary = (angles.cos() * scale).to(self._dtype), (angles.sin() * scale).to(self._dtype)
        if self._products is not None:
            return self._products.plan_heads(rotary, inputs, pool)
        return TorchHeads(self.config, rotary, inputs, pool)

    def _add_mlp(self, hidden: torch.Tensor, layer: LayerWeights) -> None:
        gate_up = self._after_norm(layer.gate_up, hidden, layer.mlp_norm)
        if self._products is None:
            gate, up = gate_up.chunk(2, dim=-1)
            hidden += self._sum(layer.down(silu(gate) * up))
        elif self._group is None:
            self._products.add_after_gate(hidden, layer.down, gate_up)
        else:
            hidden += self._group.sum(self._products.after_gate(layer.down, gate_up))

    def _add_linear(self, hidden: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        if self._products is None:
            hidden += self._sum(linear(x))
        elif self._group is None:
            self._products.add_linear(hidden, linear, x)
        else:
            hidden += self._group.sum(self._products.linear(linear, x))

    def _after_norm(self, linear: Linear, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._products is not None:
            return self._products.after_norm(linear, x, weight)
        return linear(self._norm(x, weight))
