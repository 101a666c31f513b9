"""What ranks on CUDA do, by the same code on a CPU: torch's process groups, by Gloo, and a pool in parts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from baton.core.errors import StartupError
from baton.engine.host_memory import SharedMemory
from baton.engine.kv_pool import KVPool
from baton.engine.model import DecoderModel
from baton.engine.model_config import DecoderConfig
from baton.engine.nccl_group import NcclGroup
from baton.engine.rank_group import GroupBrokenError
from baton.engine.sharding import Shard
from baton.engine.torch_executor import TorchExecutor
from baton.engine.weights import DecoderWeights, WeightForm
from tests.integration.engine import families
from tests.integration.engine.gloo_ranks import by_gloo
from tests.integration.engine.sequences import Sequence, generate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SIZES = (2, 3)


class Ranks:
    """Threads with a group each."""

    def __init__(self, size: int) -> None:
        self.memory = SharedMemory.create(0)
        self.shards = [Shard(rank, size) for rank in range(size)]
        self.groups = [NcclGroup(shard, self.memory.fd, timeout_s=60, connect=by_gloo) for shard in self.shards]
        self._threads = ThreadPoolExecutor(size)

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(call, range(len(self.groups))))

    def close(self) -> None:
        self.each(lambda rank: self.groups[rank].leave())
        self._threads.shutdown()
        self.memory.close()


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


def test_sums_and_joins_under_one_epoch_after_the_other(ranks):
    size = len(ranks.groups)
    whole = torch.randn(5, 211)
    cuts = Shard(0, size).cuts(211)
    for epoch in (1, 2):
        ranks.each(lambda rank: ranks.groups[rank].join(epoch))  # noqa: B023
        parts = [torch.full((2, 3), float(rank + 1)) for rank in range(size)]
        sums = ranks.each(lambda rank: ranks.groups[rank].sum(parts[rank]))  # noqa: B023
        assert all(torch.equal(each, torch.full((2, 3), size * (size + 1) / 2)) for each in sums)
        assert sums[1] is parts[1]
        joined = ranks.each(
            lambda rank: ranks.groups[rank].side_by_side(
                whole[:, cuts[rank].first : cuts[rank].first + cuts[rank].count], 211
            )
        )
        assert all(torch.equal(each, whole) for each in joined)


def test_a_rank_that_leaves_breaks_the_group_and_all_may_join_again(ranks):
    def leave_or_fail(rank: int) -> None:
        if rank == 1:
            ranks.groups[1].leave()
            return
        with pytest.raises(GroupBrokenError):
            ranks.groups[rank].sum(torch.ones(3))
        ranks.groups[rank].leave()

    ranks.each(lambda rank: ranks.groups[rank].join(1))
    ranks.each(leave_or_fail)
    ranks.each(lambda rank: ranks.groups[rank].join(2))
    sums = ranks.each(lambda rank: ranks.groups[rank].sum(torch.ones(3)))
    assert [each.tolist() for each in sums] == [[len(ranks.groups)] * 3] * len(ranks.groups)


def test_ranks_with_pools_of_their_own_generate_what_the_reference_does(ranks, tmp_path):
    families.save_model("llama-all-heads", tmp_path)
    config = DecoderConfig.from_folder(tmp_path)
    ranks.each(lambda rank: ranks.groups[rank].join(1))

    def run(rank: int) -> list[int]:
        shard = ranks.shards[rank]
        part = config.part(shard)
        weights = DecoderWeights.from_folder(tmp_path, config, WeightForm(dtype=torch.float32, shard=shard))
        pool = KVPool(part.kv_layout(4, "float32"), 12)
        executor = TorchExecutor(DecoderModel(part, weights, ranks.groups[rank]), pool)
        return generate(executor, Sequence("a", list(range(5, 24)), list(range(12))), 12, chunks=(7, 2))

    expected = families.reference_tokens(families.reference_model(tmp_path), list(range(5, 24)), 12)
    assert ranks.each(run) == [expected] * len(ranks.groups)


def test_without_nccl_it_says_so(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(StartupError, match="has no NCCL, which CUDA ranks need"):
        NcclGroup(Shard(0, 2), 0, timeout_s=1)
