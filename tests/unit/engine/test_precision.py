from __future__ import annotations

import pytest
import torch

from baton.core.errors import StartupError
from baton.engine import precision
from baton.engine.precision import require_quantization, resolve_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_named_type_is_taken_as_it_is(dtype: str) -> None:
    assert resolve_dtype(dtype, "cpu") == dtype


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16"),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "float32"),
        ({}, "float32"),
    ],
)
def test_without_a_compiler_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(precision, "compiler", lambda: None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_dtype("auto", "cpu") == expected


def test_auto_is_bfloat16_where_the_engines_own_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert resolve_dtype("auto", "cpu") == "bfloat16"


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for dtype in ("auto", "float32"):
        with pytest.raises(StartupError, match=r"^engine\.device: cuda:1 "):
            resolve_dtype(dtype, "cuda:1")


def test_int8_without_kernels_for_the_device_is_refused() -> None:
    require_quantization("int8", "cpu", None)
    require_quantization("none", "cuda", None)
    require_quantization("none", "cpu", "fp8")
    with pytest.raises(StartupError, match=r"^engine\.quantization: int8 has kernels for cpu only, not for cuda:1"):
        require_quantization("int8", "cuda:1", None)


def test_int8_of_weights_that_are_stored_quantized_is_refused() -> None:
    with pytest.raises(StartupError, match=r"^engine\.quantization: int8 of weights .* already \(fp8\)"):
        require_quantization("int8", "cpu", "fp8")
