from __future__ import annotations

import pytest
import torch

from baton.engine.int8_weight import Int8Weight
from baton.engine.quantization import GROUP, matrix_bytes
from baton.engine.weights import Linear


def quantized(matrix: torch.Tensor) -> Int8Weight:
    made = Int8Weight.empty(*matrix.shape, lambda dtype, *shape: torch.full(shape, 77, dtype=dtype))
    made.put(0, matrix)
    return made


@pytest.mark.parametrize("in_features", [1, 5, GROUP - 1, GROUP, GROUP + 1, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_element_is_off_by_half_a_step_of_its_group_at_most(in_features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(in_features)
    matrix = (torch.randn(30, in_features) * torch.logspace(-5, 3, 30)[:, None]).to(dtype)
    made = quantized(matrix)
    assert made.shape == (30, in_features)
    error = (made.rows(slice(None), torch.float32) - matrix.float()).abs()
    for group in range(made.scales.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        largest = matrix[:, columns].float().abs().amax(1)
        # A bfloat16 scale is at most a 128th above the wanted one.
        assert (error[:, columns].amax(1) <= largest / 127 * (1 + 1 / 128) / 2 * 1.0001).all()
        assert (made.values[:, group].abs().amax(1) > 120).all()


def test_values_stay_within_127_and_beyond_the_inputs_they_are_zero() -> None:
    matrix = torch.full((3, 70), 127 / 128)
    matrix[1] = 0.0
    matrix[2] *= -1
    made = quantized(matrix)
    assert made.values.abs().max() == 127
    assert not made.values[:, 1, 6:].any()
    assert torch.equal(made.rows(torch.tensor([1]), torch.float32), torch.zeros(1, 70))


def test_rows_are_put_anywhere() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(9, 100)
    made = Int8Weight.empty(9, 100, lambda dtype, *shape: torch.zeros(shape, dtype=dtype))
    made.put(4, matrix[4:])
    made.put(0, matrix[:4])
    whole = quantized(matrix)
    assert torch.equal(made.values, whole.values)
    assert torch.equal(made.scales, whole.scales)


@pytest.mark.parametrize("shape", [(7, 64), (7, 65), (3, 576)])
def test_its_size_is_what_is_planned_for(shape: tuple[int, int]) -> None:
    assert quantized(torch.randn(*shape)).nbytes == matrix_bytes(*shape, quantization="int8", element_bytes=2)
    assert matrix_bytes(*shape, quantization="none", element_bytes=2) == shape[0] * shape[1] * 2


@pytest.mark.parametrize("is_emulated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_map_computes_with_the_dequantized_weights(dtype: torch.dtype, is_emulated: bool) -> None:
    torch.manual_seed(2)
    weight, bias, x = quantized(torch.randn(150, 90)), torch.randn(150).to(dtype), torch.randn(5, 90).to(dtype)
    expected = x.double() @ weight.rows(slice(None), torch.float64).t() + bias.double()
    actual = Linear(weight, bias, is_emulated)(x)
    assert actual.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * 10)
