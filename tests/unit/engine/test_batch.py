from __future__ import annotations

import pytest

from baton.engine.batch import BatchPlan, SequenceSlice


def piece(tokens: list[int], start: int, table: list[int]) -> SequenceSlice:
    return SequenceSlice(attempt_id="a", token_ids=tokens, start_position=start, block_table=table, sampling=None)


def test_a_slice_ends_where_the_next_token_stands():
    assert piece([1, 2, 3], 5, [0]).end_position == 8
    assert BatchPlan(slices=[piece([1, 2, 3], 5, [0]), piece([4], 0, [1])]).num_tokens == 4


def test_a_sound_plan_fits():
    BatchPlan(slices=[piece([1, 2, 3], 5, [0, 7]), piece([1], 3, [3])]).assert_fits(block_size=4, num_blocks=8)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (piece([], 0, [0]), "without tokens"),
        (piece([1], -1, [0]), "starts at -1"),
        (piece([1, 2], 3, [0]), "1 blocks, 5 positions need 2"),
        (piece([1], 0, [-1]), "negative block id"),
        (piece([1], 0, [8]), "beyond 7"),
    ],
)
def test_an_unsound_plan_is_a_bug(bad, message):
    with pytest.raises(AssertionError, match=message):
        BatchPlan(slices=[bad]).assert_fits(block_size=4, num_blocks=8)
