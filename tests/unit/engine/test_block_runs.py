from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from baton.engine.block_runs import CopyRun, copy_runs


@pytest.mark.parametrize(
    ("source", "destination", "runs"),
    [
        ([], [], []),
        ([5], [2], [CopyRun(5, 2, 1)]),
        ([0, 1, 2], [7, 8, 9], [CopyRun(0, 7, 3)]),
        ([0, 1, 3], [7, 8, 9], [CopyRun(0, 7, 2), CopyRun(3, 9, 1)]),
        ([0, 1, 2], [7, 9, 10], [CopyRun(0, 7, 1), CopyRun(1, 9, 2)]),
        ([3, 2, 1], [3, 2, 1], [CopyRun(3, 3, 1), CopyRun(2, 2, 1), CopyRun(1, 1, 1)]),
    ],
)
def test_blocks_that_follow_each_other_on_both_sides_go_in_one_run(source, destination, runs):
    assert list(copy_runs(source, destination)) == runs


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_the_runs_are_the_same_copy_and_as_few_as_can_be(pairs):
    source, destination = [s for s, _ in pairs], [d for _, d in pairs]
    runs = list(copy_runs(source, destination))
    assert [(s + i, d + i) for s, d, length in runs for i in range(length)] == pairs
    assert all(
        (one.source + one.length, one.destination + one.length) != (two.source, two.destination)
        for one, two in itertools.pairwise(runs)
    )
