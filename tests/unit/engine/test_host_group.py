"""Ranks that are threads here: what they exchange is memory, so processes do no different."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from baton.engine import host_group
from baton.engine.host_group import SLOT_BYTES, HostGroup
from baton.engine.host_memory import SharedMemory
from baton.engine.rank_group import GroupBrokenError
from baton.engine.sharding import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Ranks:
    def __init__(self, size: int) -> None:
        self.memory = SharedMemory.create(HostGroup.num_bytes(size))
        self.groups = [HostGroup(Shard(rank, size), self.memory, timeout_s=20.0) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)
        self.each(lambda rank: self.groups[rank].join(1))

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self.threads.map(call, range(len(self.groups))))


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.threads.shutdown()
    ranks.memory.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_elements", [1, 1000, SLOT_BYTES // 2 + 7])
def test_sums_are_exact_in_the_order_of_the_ranks_and_the_same_for_all(ranks, dtype, num_elements):
    parts = [torch.randn(num_elements, dtype=dtype) for _ in ranks.groups]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    sums = ranks.each(lambda rank: ranks.groups[rank].sum(parts[rank]))
    assert all(torch.equal(each, expected) for each in sums)
    assert sums[1] is parts[1]


@pytest.mark.parametrize(("rows", "total"), [(1, 211), (5, 10), (40, 30_001)])
def test_parts_are_joined_whatever_their_widths(ranks, rows, total):
    whole = torch.randn(rows, total)
    cuts = Shard(0, len(ranks.groups)).cuts(total)
    parts = [whole[:, cut.first : cut.first + cut.count] for cut in cuts]
    joined = ranks.each(lambda rank: ranks.groups[rank].side_by_side(parts[rank], total))
    assert all(torch.equal(each, whole) for each in joined)


def test_no_exchange_sees_anothers_parts(ranks):
    """Ranks that are quick or slow by turns: a slot is not used again before all have read it."""
    size = len(ranks.groups)

    def run(rank: int) -> list[float]:
        found = []
        for turn in range(300):
            if turn % size == rank:
                torch.randn(2000).sort()
            found.append(ranks.groups[rank].sum(torch.full((3,), float(turn * 10 + rank)))[2].item())
        return found

    expected = [float(size * turn * 10 + sum(range(size))) for turn in range(300)]
    assert ranks.each(run) == [expected] * size


def test_a_rank_that_leaves_ends_the_others_wait_and_all_may_join_again(ranks):
    def leave_or_wait(rank: int) -> None:
        if rank == 1:
            ranks.groups[1].leave()
            return
        with pytest.raises(GroupBrokenError, match="has left"):
            ranks.groups[rank].sum(torch.ones(3))
        ranks.groups[rank].leave()

    for epoch in (2, 3):
        ranks.each(leave_or_wait)
        ranks.each(lambda rank: ranks.groups[rank].join(epoch))  # noqa: B023
        sums = ranks.each(lambda rank: ranks.groups[rank].sum(torch.ones(3)))
        assert [each.tolist() for each in sums] == [[len(ranks.groups)] * 3] * len(ranks.groups)


def test_a_late_rank_breaks_the_group():
    ranks = Ranks(2)
    ranks.groups[0]._timeout_s = 0.05
    with pytest.raises(GroupBrokenError, match=r"rank 1 is 0\.05 s behind"):
        ranks.groups[0].sum(torch.ones(3))
    ranks.memory.close()


def test_whoever_waits_looks_after_the_others(monkeypatch):
    memory = SharedMemory.create(HostGroup.num_bytes(2))

    def gone() -> None:
        raise ProcessLookupError

    monkeypatch.setattr(host_group, "_LOOKS", 1)
    group = HostGroup(Shard(0, 2), memory, timeout_s=20, check=gone)
    with pytest.raises(ProcessLookupError):
        group.join(1)
    memory.close()
