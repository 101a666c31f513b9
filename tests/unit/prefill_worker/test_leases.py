from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import CancelledError
from baton.telemetry.instruments import WorkerInstruments, new_registry
from baton.worker.engine_loop import EngineStats, EventBatch
from baton.worker.messages import Failed
from kv_transfer.descriptor import Growth
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.lease import LeaseOutcome
from prefill_worker.leases import LiveLeases
from prefill_worker.messages import CacheGrown, FirstToken, HeldCache, PromptDone, Released


class Server:
    """The leases, fed with events by hand."""

    def __init__(self) -> None:
        self.registry = new_registry()
        self.commands = []
        self.leases = LiveLeases(self.commands.append, 5.0, WorkerInstruments(self.registry))

    def tell(self, *events) -> None:
        self.leases.observe(EventBatch(events=events, num_commands=0, stats=EngineStats(), step=None))

    def grow(self, *block_ids: int) -> None:
        self.tell(CacheGrown(attempt_id="a", cache=cache(*block_ids), is_new=False))

    def complete(self, *block_ids: int) -> None:
        done = PromptDone(
            attempt_id="a",
            first_tokens=(FirstToken(7, None), FirstToken(8, None)),
            compute_s=0.0,
            num_chunks=2,
            num_cached_tokens=0,
            cache=cache(*block_ids),
        )
        self.tell(done)

    def num_ended(self, outcome: str) -> float:
        return self.registry.get_sample_value("baton_leases_total", {"outcome": outcome}) or 0.0


def cache(*block_ids: int) -> HeldCache:
    return HeldCache(lease_id="lease", slot=0, generation=1, block_ids=block_ids)


@pytest.fixture
def server() -> Server:
    return Server()


async def test_a_follower_hears_of_each_block_once_and_of_the_end(server: Server) -> None:
    server.grow(3, 4)
    following = server.leases.follow_lease("lease", "pair")
    assert await anext(following) == Growth((3, 4))
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    assert not waiting.done()
    server.grow(3, 4, 5)
    assert await waiting == Growth((5,))
    # What is told while nobody listens comes in one piece.
    server.grow(3, 4, 5, 6)
    server.complete(3, 4, 5, 6, 9)
    assert await anext(following) == Growth((6, 9), (7, 8))
    with pytest.raises(StopAsyncIteration):
        await anext(following)


async def test_a_follower_who_comes_late_hears_all_at_once(server: Server) -> None:
    server.complete(1, 2)
    assert [growth async for growth in server.leases.follow_lease("lease", "pair")] == [Growth((1, 2), (7, 8))]


@pytest.mark.parametrize(
    "end",
    [
        Released(attempt_id="a", outcome=LeaseOutcome.ABANDONED),
        Released(attempt_id="a", outcome=None),
        Failed(attempt_id="a", error=CancelledError("cancelled")),
    ],
)
async def test_a_follower_hears_that_the_lease_ends_early(server: Server, end: Released | Failed) -> None:
    server.grow(3)
    following = server.leases.follow_lease("lease", "pair")
    await anext(following)
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    server.tell(end)
    with pytest.raises(LeaseNotFoundError):
        await waiting
    assert server.num_ended("abandoned") == 1
    with pytest.raises(LeaseNotFoundError):
        server.leases.leased_blocks("lease", "pair")


async def test_a_growing_lease_is_its_first_pairs_alone(server: Server) -> None:
    server.grow(3)
    await anext(server.leases.follow_lease("lease", "pair"))
    with pytest.raises(LeaseNotFoundError):
        await anext(server.leases.follow_lease("lease", "other"))
    with pytest.raises(LeaseNotFoundError):
        server.leases.leased_blocks("lease", "other")
    assert server.leases.leased_blocks("lease", "pair").block_ids == (3,)


def test_the_end_of_an_attempt_without_a_lease_is_no_leases_end(server: Server) -> None:
    server.tell(Failed(attempt_id="b", error=CancelledError("cancelled")), Released(attempt_id="c", outcome=None))
    assert server.num_ended("abandoned") == 0
