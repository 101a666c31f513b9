from __future__ import annotations

import pytest

from baton.core.errors import StartupError
from baton.engine.rank_hardware import require_whole_host
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


@pytest.mark.parametrize(("total", "counts"), [(64 * 7, [192, 256]), (80, [40, 40]), (64, [32, 32])])
def test_features_are_divided_in_groups_of_quantization_where_there_are_enough(total: int, counts: list[int]) -> None:
    assert [Shard(rank, 2).cut_features(total).count for rank in range(2)] == counts


def test_several_ranks_on_one_numbered_device_are_refused() -> None:
    require_whole_host(1, "cuda:3")
    require_whole_host(8, "cpu")
    require_whole_host(8, "cuda")
    with pytest.raises(StartupError, match=r"engine\.device: must be cpu or cuda for 2 ranks, got cuda:3: they take"):
        require_whole_host(2, "cuda:3")
