"""The compiled library's functions and structures, as ctypes sees them. Mirrors decoder.c and linear.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
OK, NO_MEMORY, NO_SUCH_TOKEN = 0, 1, 2


class Linear(Structure):
    """A product with weights [out, in]; `scale` is of int8 weights, `bias` float32 or None."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("out", "in_")),
    ]


class Layer(Structure):
    """One decoder layer; norms are float32, `window` is 0 for none."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("window", c_int64),
    ]


class Model(Structure):
    """A whole model and its pool."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("type", "cache_type", "vocabulary", "hidden", "inner", "layers")),
        *((name, c_int64) for name in ("query_heads", "kv_heads", "head_dim", "block_size")),
        *((name, c_double) for name in ("norm_epsilon", "rope_scale")),
        *((name, c_void_p) for name in ("inv_freq", "final_norm", "embeddings", "embedding_scale")),
        ("layer", POINTER(Layer)),
        ("head", Linear),
        ("pool", c_void_p),
    ]


class Batch(Structure):
    """One step: int32 arrays in, float32 logits [sampled, vocabulary] out."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("rows", "sampled")),
        *((name, c_void_p) for name in ("tokens", "positions", "tables", "table_starts", "sampled_rows", "logits")),
    ]


def open_library(path: Path) -> ctypes.CDLL:
    """Loads the library and declares its functions. Calls release the interpreter's lock. OSError if it is broken."""
    library = ctypes.CDLL(str(path))
    library.baton_create.argtypes, library.baton_create.restype = [POINTER(Model), c_int], c_void_p
    library.baton_destroy.argtypes, library.baton_destroy.restype = [c_void_p], None
    library.baton_step.argtypes, library.baton_step.restype = [c_void_p, POINTER(Batch)], c_int
    library.baton_use_threads.argtypes, library.baton_use_threads.restype = [c_void_p, c_int], None
    library.baton_place.argtypes, library.baton_place.restype = [c_int, c_int64], c_int64
    library.baton_padded.argtypes, library.baton_padded.restype = [c_int64], c_int64
    return library
