"""Percentiles of samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` percent of the samples do not exceed, interpolated between neighbours.

    NaN without samples: a figure that was not measured must not look like one that was.
    """
    assert 0 <= percent <= 100, percent
    if not samples:
        return math.nan
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(samples: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(samples, 50)
