"""Weights of a decoder, read from safetensors files into the shapes that the model computes with."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from baton.core.errors import StartupError
from baton.core.fingerprint import weight_files
from baton.engine.checkpoint import UnpackedTensors
from baton.engine.host_memory import allocate
from baton.engine.int8_weight import Int8Weight
from baton.engine.quantization import matrix_bytes
from baton.engine.sharding import WHOLE, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from baton.engine.model_config import DecoderConfig
    from baton.engine.sharding import Cut, Shard

# Buffers that old exports carry along; nothing is computed from them.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


# Elements of the weights that are widened at a time: 4 MiB, so that they are still in the cache when used.
WIDENED_ELEMENTS = 1 << 20
# Tensors in one piece of memory begin at multiples of a cache line.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """An affine map: `weight` is [out, in], `bias` [out] or None. The one place to put another kernel or format.

    `is_emulated` says that the device has no fast matrix product in the model's dtype.
    """

    weight: torch.Tensor | Int8Weight
    bias: torch.Tensor | None = None
    is_emulated: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] to [tokens, out], in the dtype of `x`."""
        if self.is_emulated:
            return self._widened(x, torch.float32)
        if isinstance(self.weight, Int8Weight):
            return self._widened(x, x.dtype)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def _widened(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same, computed in `dtype`, a slab of outputs at a time."""
        out_features, in_features = self.weight.shape
        wide = x.to(dtype)
        output = torch.empty(x.shape[0], out_features, dtype=dtype, device=x.device)
        slab = max(1, WIDENED_ELEMENTS // in_features)
        for start in range(0, out_features, slab):
            part = rows_of(self.weight, slice(start, start + slab), dtype)
            torch.mm(wide, part.t(), out=output[:, start : start + slab])
        if self.bias is not None:
            output += self.bias
        return output.to(x.dtype)


def rows_of(matrix: torch.Tensor | Int8Weight, index: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a matrix in `dtype`, [rows, in]."""
    return matrix.rows(index, dtype) if isinstance(matrix, Int8Weight) else matrix[index].to(dtype)


def _is_emulated(dtype: torch.dtype, device: str) -> bool:
    """Whether this machine's oneDNN lacks instructions for `dtype`."""
    if device != "cpu" or dtype == torch.float32:
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. `qkv` gives queries, keys and values side by side, `gate_up` the MLP's two inner halves."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """What is kept of a model's weights, and how.

    With `quantization` `int8` all matrices are quantized when they are loaded, from the precision that they are stored
    in. What is not quantized is in `dtype`. Of each matrix only what `shard` has is loaded.
    """

    dtype: torch.dtype
    device: str = "cpu"
    quantization: str = "none"
    shard: Shard = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole model: `embeddings` is [vocab_size, hidden_size]. What is not quantized is in `dtype`."""

    dtype: torch.dtype
    embeddings: torch.Tensor | Int8Weight
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear

    @classmethod
    def from_folder(cls, path: Path, config: DecoderConfig, form: WeightForm) -> DecoderWeights:
        """Loads the `weight_files` of `path` in that form; `config` is the whole model's. Blocks.

        Files are mapped, so at most one layer is held twice, and what is not loaded is not read.

        Raises StartupError that names tensors that are missing, not expected or of another shape, an unreadable
        file, or the memory that was not there.
        """
        try:
            with ExitStack() as files, torch.inference_mode():
                handles = [UnpackedTensors.load(path, form.dtype)] if config.stored_quantization else _open(path, files)
                source = _Tensors(path, handles, form)
                weights = cls._assemble(source, config)
                source.require_all_used(config)
                return weights
        except (OSError, SafetensorError) as error:
            raise StartupError(f"{path}: cannot read the weights: {error}") from error
        except (MemoryError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StartupError(f"{path}: cannot load the weights on {form.device}: {reason}") from error

    @classmethod
    def _assemble(cls, source: _Tensors, config: DecoderConfig) -> DecoderWeights:
        vocabulary, hidden = source.form.shard.cut(config.vocab_size), whole(config.hidden_size)
        embeddings = source.matrix({"model.embed_tokens.weight": vocabulary}, hidden)
        layers = tuple(_layer(source, config, index) for index in range(config.num_layers))
        final_norm = source.take("model.norm.weight", hidden)
        if config.tied_embeddings:
            head = Linear(embeddings, is_emulated=source.is_emulated)
        else:
            head = source.fused("", {"lm_head": vocabulary}, hidden, bias=False)
        return cls(dtype=source.form.dtype, embeddings=embeddings, layers=layers, final_norm=final_norm, head=head)


def _layer(source: _Tensors, config: DecoderConfig, index: int) -> LayerWeights:
    prefix = f"model.layers.{index}."
    hidden, inner = whole(config.hidden_size), source.form.shard.cut_features(config.intermediate_size)
    head = whole(config.head_dim)
    # A KV head stays together with the query heads that read it.
    queries = source.form.shard.cut(config.num_kv_heads, config.num_heads // config.num_kv_heads * config.head_dim)
    keys = source.form.shard.cut(config.num_kv_heads, config.head_dim)
    attention = prefix + "self_attn."
    query_norm = source.take(attention + "q_norm.weight", head) if config.qk_norm else None
    key_norm = source.take(attention + "k_norm.weight", head) if config.qk_norm else None
    qkv_parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return LayerWeights(
        input_norm=source.take(prefix + "input_layernorm.weight", hidden),
        qkv=source.fused(attention, qkv_parts, hidden, bias=config.qkv_bias),
        query_norm=query_norm,
        key_norm=key_norm,
        output=source.fused(attention, {"o_proj": hidden}, queries, bias=config.output_bias),
        mlp_norm=source.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=source.fused(prefix + "mlp.", {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias),
        down=source.fused(prefix + "mlp.", {"down_proj": hidden}, inner, bias=config.mlp_bias),
    )


class _Tensors:
    """The tensors of all of a folder's files by name, each taken once, whole or cut."""

    def __init__(self, path: Path, handles: Sequence[Any], form: WeightForm) -> None:
        self.form = form
        self._path = path
        self.is_emulated = _is_emulated(form.dtype, form.device)
        self._handles: dict[str, Any] = {}
        for handle in handles:
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        self._unused = set(self._handles)
        self._free = self._memory()

    def take(self, name: str, *cuts: Cut) -> torch.Tensor:
        """The tensor called `name` in the dtype and on the device of the model."""
        return self._empty(self.form.dtype, *(cut.count for cut in cuts)).copy_(self._mapped(name, *cuts))

    def matrix(self, parts: dict[str, Cut], inputs: Cut) -> torch.Tensor | Int8Weight:
        """The matrices called so, each of so many rows, one below the other; quantized if the model is to be."""
        num_rows = sum(outputs.count for outputs in parts.values())
        made: torch.Tensor | Int8Weight
        if self.form.quantization == "int8":
            made = Int8Weight.empty(num_rows, inputs.count, self._empty)
        else:
            made = self._empty(self.form.dtype, num_rows, inputs.count)
        row = 0
        for name, outputs in parts.items():
            part = self._mapped(name, outputs, inputs)
            if isinstance(made, Int8Weight):
                made.put(row, part)
            else:
                made[row : row + outputs.count] = part
            row += outputs.count
        return made

    def fused(self, prefix: str, parts: dict[str, Cut], inputs: Cut, *, bias: bool) -> Linear:
        """The projections `prefix` + part, each of so many outputs, as one map with their outputs side by side.

        Where the inputs are cut the ranks' outputs are added up, so only the first rank has the bias.
        """
        weight = self.matrix({f"{prefix}{part}.weight": outputs for part, outputs in parts.items()}, inputs)
        offsets = self._empty(self.form.dtype, weight.shape[0]) if bias else None
        row = 0
        for part, outputs in parts.items():
            end = row + outputs.count
            if offsets is not None:
                offsets[row:end] = self._mapped(f"{prefix}{part}.bias", outputs)
            row = end
        return Linear(weight, offsets if inputs.first == 0 else None, self.is_emulated)

    def require_all_used(self, config: DecoderConfig) -> None:
        """Raises StartupError when the files hold tensors that this model would not use: it is not this model."""
        if config.tied_embeddings:
            self._unused.discard("lm_head.weight")
        unexpected = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIXES))
        if unexpected:
            raise StartupError(f"{self._path}: unexpected tensors for {config.family}: {_shortened(unexpected)}")

    def _memory(self) -> torch.Tensor | None:
        """Room for all tensors in one piece, on a CPU; for those of a shard about that."""
        if self.form.device != "cpu":
            return None
        shapes = [handle.get_slice(name).get_shape() for name, handle in self._handles.items()]
        return allocate(sum(self._tensor_bytes(shape) for shape in shapes))

    def _tensor_bytes(self, shape: list[int]) -> int:
        """With what alignment may add."""
        num_bytes = math.prod(shape) * self.form.dtype.itemsize
        if len(shape) == 2:
            num_bytes = matrix_bytes(
                *shape, quantization=self.form.quantization, element_bytes=self.form.dtype.itemsize
            )
        return -(-num_bytes // self.form.shard.size) + 2 * ALIGNMENT_BYTES

    def _empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._free is None or len(self._free) < num_bytes:
            return torch.empty(shape, dtype=dtype, device=self.form.device)
        taken, self._free = self._free[:num_bytes], self._free[-(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]
        return taken.view(dtype).view(shape)

    def _mapped(self, name: str, *cuts: Cut) -> torch.Tensor:
        handle = self._handles.get(name)
        if handle is None:
            raise StartupError(f"{self._path}: tensor {name} is missing")
        tensor: torch.Tensor = handle.get_tensor(name)
        shape = tuple(cut.total for cut in cuts)
        if tuple(tensor.shape) != shape:
            raise StartupError(f"{self._path}: tensor {name} is {tuple(tensor.shape)}, config.json implies {shape}")
        if not tensor.is_floating_point():
            raise StartupError(f"{self._path}: tensor {name} is {tensor.dtype}: quantized weights are not supported")
        self._unused.discard(name)
        return tensor[tuple(slice(cut.first, cut.first + cut.count) for cut in cuts)]


def _open(path: Path, files: ExitStack) -> list[Any]:
    return [files.enter_context(safe_open(file, framework="pt")) for file in weight_files(path)]


def _shortened(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
