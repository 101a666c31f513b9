"""Matrices of int8 with a scale for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from baton.engine.quantization import GROUP, num_groups

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST = 127
# Elements that are quantized at a time: temporaries stay in the cache.
_ELEMENTS_AT_A_TIME = 1 << 18


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A matrix [out, in_features]: element (o, i) is `values[o, i // GROUP, i % GROUP] * scales[o, i // GROUP]`.

    `values` is int8 [out, groups, GROUP], zero beyond `in_features`; `scales` is bfloat16 [out, groups].
    """

    values: torch.Tensor
    scales: torch.Tensor
    in_features: int

    @classmethod
    def empty(cls, num_rows: int, in_features: int, memory: Callable[..., torch.Tensor]) -> Int8Weight:
        """One to be filled; `memory(dtype, *shape)` gives an uninitialised tensor."""
        groups = num_groups(in_features)
        values, scales = memory(torch.int8, num_rows, groups, GROUP), memory(torch.bfloat16, num_rows, groups)
        return cls(values, scales, in_features)

    def put(self, first_row: int, matrix: torch.Tensor) -> None:
        """Makes rows from `first_row` on the nearest to those of `matrix` [rows, in_features] in any precision. Blocks.

        Symmetric: a group's scale is the least bfloat16 by which its largest element stays within 127.
        """
        groups = num_groups(self.in_features)
        step = max(1, _ELEMENTS_AT_A_TIME // self.in_features)
        for start in range(0, len(matrix), step):
            rows = matrix[start : start + step].to(torch.float32)
            grouped = pad(rows, (0, groups * GROUP - self.in_features)).view(-1, groups, GROUP)
            scales = _rounded_up(grouped.abs().amax(-1) / LARGEST)
            divisors = scales.to(torch.float32).masked_fill(scales == 0, 1.0)[..., None]
            own = slice(first_row + start, first_row + start + len(rows))
            self.values[own], self.scales[own] = (grouped / divisors).round(), scales

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        return self.values.shape[0], self.in_features

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def rows(self, index: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of it in `dtype`, [rows, in_features]."""
        wide = self.values[index].to(dtype).mul_(self.scales[index].to(dtype)[..., None])
        return wide.flatten(1)[:, : self.in_features]


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 that is not below each (not negative) element."""
    nearest = scale.to(torch.bfloat16)
    # The bits of positive numbers are in the order of the numbers.
    return (nearest.view(torch.int16) + (nearest.to(torch.float32) < scale)).view(torch.bfloat16)
