from __future__ import annotations

import pytest

from baton.engine.sharding import WHOLE, Cut, Shard, whole


@pytest.mark.parametrize(
    ("units", "size", "counts"), [(6, 2, [3, 3]), (3, 2, [1, 2]), (7, 4, [1, 2, 2, 2]), (4, 4, [1] * 4)]
)
def test_the_ranks_have_everything_once_and_about_alike(units: int, size: int, counts: list[int]) -> None:
    cuts = [Shard(rank, size).cut(units, 10) for rank in range(size)]
    assert [cut.count for cut in cuts] == [count * 10 for count in counts]
    assert [cut.first for cut in cuts] == [sum(counts[:rank]) * 10 for rank in range(size)]
    assert {cut.total for cut in cuts} == {units * 10}


def test_one_rank_has_all() -> None:
    assert WHOLE.cut(5, 2) == whole(10) == Cut(10, 0, 10)
