"""A real pair over each transport that runs without a device: the same tokens, whatever way the cache took."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from baton.coordination.embedded import EmbeddedRedis
from tests.integration.workers.harness import Pair, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = [7 * i % 200 + 1 for i in range(150)]


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker that can be read in every way; its reader is started by the tests."""
    folder = tmp_path_factory.mktemp("logs")
    with EmbeddedRedis() as redis:
        prefill = WorkerProcess("prefill_worker", "p1", redis.url, tiny_model, folder)
        decode = WorkerProcess("decode_worker", "d1", redis.url, tiny_model, folder)
        try:
            prefill.start("--engine.kv_cache_bytes", "2MiB", "--handover.transports", "shm,gloo,grpc")
            yield Pair(prefill, decode, redis, tiny_model)
        finally:
            prefill.stop()
            decode.stop()


async def test_every_way_gives_the_same_tokens(pair: Pair) -> None:
    tokens = {}
    for way, block_size in (("shm", 16), ("grpc", 16), ("gloo", 24)):
        pair.decode.start(
            *("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8"),
            *("--handover.transports", way, "--engine.block_size", str(block_size)),
        )
        async with pair.client() as client:
            answers = [await client.generate(f"{way}-{i}", PROMPT[i:], max_tokens=12) for i in range(3)]
            assert {answer.decode_events[0].handover.transport for answer in answers} == {way}
            await client.assert_all_free()
        tokens[way] = [answer.tokens for answer in answers]
        pair.decode.terminate()
        assert await asyncio.to_thread(pair.decode.wait) == 0
    assert tokens["grpc"] == tokens["shm"]
    assert tokens["gloo"] == tokens["shm"]
