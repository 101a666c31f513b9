"""The kernel for linear layers of prefill steps computes what PyTorch computes, in every type and shape."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from baton.engine import native
from baton.engine.int8_weight import Int8Weight
from baton.engine.model_config import DecoderConfig
from baton.engine.native.build import FLAGS, build, compiler
from baton.engine.native.chunks import ChunkKernels
from baton.engine.weights import Linear, rows_of
from tests.integration.engine import families

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
# Outputs and inputs around vectors, panels (of 8, 16 or 32) and depths (of 320, and of 576 for int8).
SHAPES = ((1, 1), (7, 33), (16, 320), (97, 319), (211, 48), (130, 700))
ROWS = (1, 2, 5, 6, 7, 13, 48)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    path = tmp_path_factory.mktemp("llama")
    families.save_model("llama", path)
    return DecoderConfig.from_folder(path)


@pytest.fixture(scope="module")
def kernels(config: DecoderConfig) -> ChunkKernels:
    library = build()
    assert library is not None
    return ChunkKernels(config, library, num_threads=2)


def random_linear(out_features: int, in_features: int, dtype: torch.dtype, *, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(out_features + in_features)
    matrix = torch.randn(out_features, in_features, generator=generator)
    weight: torch.Tensor | Int8Weight = matrix.to(dtype)
    if dtype == torch.int8:
        weight = Int8Weight.empty(out_features, in_features, lambda dtype, *shape: torch.empty(shape, dtype=dtype))
        weight.put(0, matrix)
    offsets = torch.randn(out_features, generator=generator).to(torch.bfloat16) if bias else None
    return Linear(weight, offsets)


def steps_of(x: torch.Tensor) -> torch.Tensor:
    """What int8 weights see a row's elements in multiples of, [rows, 1]."""
    return x.abs().amax(1, keepdim=True) / 32767


def expected(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    weight = rows_of(layer.weight, slice(None), torch.float32)
    if not isinstance(layer.weight, Int8Weight):
        return linear(x.double(), weight.double(), bias).float()
    per_step = torch.tensor(32767.0) / x.abs().amax(1, keepdim=True)
    whole = linear((x.double() * per_step.double()).round(), weight.double())
    return (whole * steps_of(x).double() + (0.0 if bias is None else bias)).float()


def compare(kernels: ChunkKernels, dtype: torch.dtype, num_rows: int, *, rounds_alike: bool = True) -> None:
    """Elements half a step from two whole numbers may go to either if they were not `rounds_alike` computed."""
    for out_features, in_features in SHAPES:
        rows = torch.randn(num_rows, 2 * in_features + 3)
        x, gate_up = rows[:, :in_features], rows[:, : 2 * in_features]
        norm = torch.randn(in_features).to(torch.bfloat16)
        normed = rms_norm(x, (in_features,), norm.float(), 1e-6)
        gate, up = gate_up.chunk(2, dim=1)
        gated = silu(gate) * up
        for bias in (True, False):
            layer = random_linear(out_features, in_features, dtype, bias=bias)
            for actual, of in (
                (kernels.linear(layer, x), x),
                (kernels.after_norm(layer, x, norm), normed),
                (kernels.after_gate(layer, gate_up), gated),
            ):
                error = 1e-5 * in_features**0.5
                if dtype == torch.int8 and not (rounds_alike and of is x):
                    error += 10 * steps_of(of).max().item()
                torch.testing.assert_close(actual, expected(layer, of), rtol=0.0, atol=error)
            sums = torch.randn(2, num_rows, out_features)
            added = sums + torch.stack((kernels.linear(layer, x), kernels.after_gate(layer, gate_up)))
            kernels.add_linear(sums[0], layer, x)
            kernels.add_after_gate(sums[1], layer, gate_up)
            assert torch.equal(sums, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_equal_those_of_torch(kernels: ChunkKernels, dtype: torch.dtype, num_rows: int) -> None:
    compare(kernels, dtype, num_rows)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
@pytest.mark.parametrize("dtype", DTYPES)
def test_so_do_those_of_the_smallest_instruction_set(config: DecoderConfig, dtype: torch.dtype) -> None:
    """Vectors of 4 lanes and no fused multiplication, where the machine's own code has other ones."""
    library = build(machine="-march=x86-64")
    assert library is not None
    compare(ChunkKernels(config, library, num_threads=2), dtype, 13, rounds_alike=False)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another instruction set")
@pytest.mark.parametrize("machine", ["-march=sandybridge", "-U__SSE2__"])
def test_int8_products_need_no_instructions_for_pairs(config: DecoderConfig, tmp_path: Path, machine: str) -> None:
    """Whole numbers in narrower vectors than floats; and pairs in the order of processors without such instructions."""
    tool, library = compiler(), tmp_path / "chunks.so"
    assert tool is not None
    source = Path(native.__file__).with_name("chunks.c")
    subprocess.run([tool, *FLAGS, "-O1", machine, str(source), "-o", str(library), "-lm"], check=True)
    compare(ChunkKernels(config, library, num_threads=2), torch.int8, 13, rounds_alike=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_any_others_on_any_number_of_threads(
    kernels: ChunkKernels, dtype: torch.dtype
) -> None:
    """More rows than are packed at a time (384)."""
    layer = random_linear(211, 700, dtype)
    x, norm = torch.randn(401, 1400), torch.randn(700)
    computations: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda rows: kernels.linear(layer, rows[:, :700]),
        lambda rows: kernels.after_norm(layer, rows[:, :700], norm),
        lambda rows: kernels.after_gate(layer, rows),
    )
    for compute in computations:
        kernels.use_threads(1)
        whole = compute(x)
        for num_threads in (5, 2):
            kernels.use_threads(num_threads)
            assert torch.equal(compute(x), whole)
            for first, end in ((0, 1), (383, 385), (390, 401)):
                assert torch.equal(compute(x[first:end]), whole[first:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_none_stay_in_their_rows(kernels: ChunkKernels, dtype: torch.dtype, number: float) -> None:
    x = torch.randn(9, 100)
    x[4, 50] = number
    product = kernels.linear(random_linear(40, 100, dtype), x)
    assert not product[4].isfinite().any()
    assert product[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


def test_rows_of_the_largest_numbers_and_of_zeros_lose_nothing(kernels: ChunkKernels) -> None:
    """Sums of a group come within an eighth of what 32 bits hold."""
    layer = random_linear(40, 640, torch.int8, bias=False)
    assert isinstance(layer.weight, Int8Weight)
    layer.weight.values.fill_(127)
    x = torch.full((8, 640), 3.0)
    x[1] = -3.0
    torch.testing.assert_close(kernels.linear(layer, x), expected(layer, x), rtol=1e-6, atol=0.0)
    assert torch.equal(kernels.linear(layer, x * 0), torch.zeros(8, 40))
