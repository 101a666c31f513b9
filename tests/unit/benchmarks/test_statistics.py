from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.statistics import median, percentile

NUMBERS = st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=2, max_size=50)


@given(NUMBERS)
def test_percentiles_are_those_of_the_standard_library(samples: list[float]) -> None:
    expected = statistics.quantiles(samples, n=100, method="inclusive")
    for percent in (1, 50, 95, 99):
        assert percentile(samples, percent) == pytest.approx(expected[percent - 1], rel=1e-9, abs=1e-6)
    assert median(samples) == pytest.approx(statistics.median(samples), rel=1e-9, abs=1e-6)


def test_the_ends_are_the_least_and_the_greatest() -> None:
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0


def test_one_sample_is_every_percentile() -> None:
    assert percentile([7.0], 99) == 7.0


def test_what_was_not_measured_is_no_number() -> None:
    assert math.isnan(percentile([], 50))
