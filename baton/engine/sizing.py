"""How much memory a model takes, from its configuration alone: weights, KV cache, and what one step allocates.

Pure arithmetic; imports no torch. Tests hold it against files, pools and steps that were measured.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from baton.engine.quantization import matrix_bytes

if TYPE_CHECKING:
    from baton.core.model import KVLayout
    from baton.engine.model_config import DecoderConfig

_FLOAT32_BYTES = 4
# Of a sampled row's logits: the model's, those after the rules, and what a draw makes of them (shifted, divided,
# probabilities, filtered, waiting times in 64 bits and what they are computed from).
_SAMPLING_BYTES = 44
# The same of a prompt's row whose log-probabilities are asked for.
_SCORING_BYTES = 12
# Two slabs of weights that the device cannot multiply, widened: one in use, one just made.
_WIDENED_BYTES = 8 << 20
# Rows that the prefill kernels pack at a time.
_PACKED_ROWS = 384
# The decode kernels keep a partial result for each so many keys of a row, and room for a quarter more.
_SPAN_KEYS, _SPAN_SLACK = 128, 1.25
# PyTorch's attention pads each one-token row to at most twice its keys.
_PADDING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of each part of a model, biases included; `head` is 0 where it is the embeddings again."""

    embeddings: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def count_parameters(config: DecoderConfig) -> Parameters:
    """What the weight files of this model hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = queries + 2 * keys
    attention = hidden * qkv + queries * hidden + qkv * config.qkv_bias + hidden * config.output_bias
    mlp = 3 * hidden * inner + (2 * inner + hidden) * config.mlp_bias
    norms = 2 * hidden + 2 * config.head_dim * config.qk_norm
    return Parameters(
        embeddings=config.vocab_size * hidden,
        attention=config.num_layers * attention,
        mlp=config.num_layers * mlp,
        norms=config.num_layers * norms + hidden,
        head=0 if config.tied_embeddings else config.vocab_size * hidden,
    )


def weight_bytes(config: DecoderConfig, *, element_bytes: int, quantization: str) -> int:
    """What all weights take; `element_bytes` of what is not quantized."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    each_layer = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    tables = [(config.vocab_size, hidden)] * (1 if config.tied_embeddings else 2)
    matrices = each_layer * config.num_layers + tables
    others = count_parameters(config).total - sum(rows * columns for rows, columns in matrices)
    return others * element_bytes + sum(
        matrix_bytes(*shape, quantization=quantization, element_bytes=element_bytes) for shape in matrices
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The largest step of a worker: its tokens, the rows that are sampled, those scored at a time, the keys it sees.

    `is_decode`: one token a sequence. `by_kernels`: the project's own CPU kernels compute it.
    `is_quantized`: the weights are.
    """

    num_tokens: int
    num_sampled: int
    num_scored: int
    num_keys: int
    is_decode: bool
    by_kernels: bool
    is_quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a step allocates, the larger of two: while layers run, and while tokens are chosen.

    `layers` in any case, `each_key` for each cached position that it sees, up to `most_keys` of them.
    """

    layers: int
    each_key: float
    most_keys: int
    choosing: int

    def with_cache(self, num_tokens: int) -> int:
        """The bytes of a step over a cache that holds so many positions."""
        return max(self.layers + int(self.each_key * min(num_tokens, self.most_keys)), self.choosing)

    def times(self, count: int) -> StepBytes:
        """What so many processes allocate that compute the same over one cache."""
        return StepBytes(
            layers=self.layers * count,
            each_key=self.each_key * count,
            most_keys=self.most_keys,
            choosing=self.choosing * count,
        )

    def most_cache(self, num_bytes: int, token_bytes: int) -> int:
        """The largest cache, in bytes, for which it and the step fit into `num_bytes`; below 0 when the step doesn't.

        `token_bytes` is the cache of one position.
        """
        left = num_bytes - self.layers
        growing = int(left / (1 + self.each_key / token_bytes))
        return min(max(growing, left - int(self.each_key * self.most_keys)), num_bytes - self.choosing)


def step_bytes(config: DecoderConfig, layout: KVLayout, step: StepShape, *, on_cpu: bool) -> StepBytes:
    """Upper bounds of what a step allocates besides weights and cache."""
    logits = max(step.num_sampled * _SAMPLING_BYTES, step.num_scored * _SCORING_BYTES) * config.vocab_size
    if step.is_decode and step.by_kernels:
        rows = step.num_tokens * _row_values(config, by_kernels=step.by_kernels) * _FLOAT32_BYTES
        spans = config.num_heads * (config.head_dim + 2) * _FLOAT32_BYTES * _SPAN_SLACK / _SPAN_KEYS
        # They keep their room between steps.
        return StepBytes(layers=rows + logits, each_key=spans, most_keys=step.num_keys, choosing=0)
    # On a CPU intermediate results are wider than the weights where it cannot multiply their type.
    element = _FLOAT32_BYTES if on_cpu else layout.element_bytes
    is_widened = element != layout.element_bytes
    # Keys and values of one layer are gathered, and widened where attention computes in another type.
    gathered = 2 * config.num_kv_heads * config.head_dim * (layout.element_bytes + (element if is_widened else 0))
    masks = step.num_tokens * (element * len(set(config.sliding_windows)) + 2)
    of_chunks = 0 if step.by_kernels else gathered + masks
    scratch = _WIDENED_BYTES if is_widened or step.is_quantized else 0
    if step.by_kernels:
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        scratch = min(step.num_tokens, _PACKED_ROWS) * widest * _FLOAT32_BYTES
    return StepBytes(
        layers=step.num_tokens * _row_values(config, by_kernels=step.by_kernels) * element + scratch,
        each_key=_PADDING * (gathered + element) if step.is_decode else of_chunks,
        most_keys=step.num_keys,
        choosing=step.num_tokens * config.hidden_size * element + logits,
    )


def _row_values(config: DecoderConfig, *, by_kernels: bool) -> int:
    """Values of one token that are alive at once: in the MLP, or in attention, with what stays from before."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    kept = 4 * config.hidden_size + (queries + 2 * keys) + 2 * keys + queries + 2 * config.head_dim
    if by_kernels:  # they add to the hidden states, and write keys and values, without a copy
        kept -= config.hidden_size + 2 * keys
    # PyTorch makes silu(gate) and its product with up beside the two.
    mlp = (2 if by_kernels else 4) * config.intermediate_size
    return kept + max(mlp, 3 * queries + 2 * keys)
