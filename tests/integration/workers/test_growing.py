"""A long prompt's cache is taken over while it is computed, over each way that runs without a device."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.coordination.embedded import EmbeddedRedis
from baton.rpc.errors import from_call
from baton.v1 import kv_transfer_pb2
from tests.integration.workers.harness import VOCAB_SIZE, Pair, WorkerProcess, stop_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.workers.harness import Client

CHUNK = 64
# Six chunks, the last of them with an incomplete block.
PROMPT = [(7 * index + index * index) % VOCAB_SIZE for index in range(5 * CHUNK + 37)]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker of small steps; its reader is started by the tests."""
    folder = tmp_path_factory.mktemp("logs")
    with EmbeddedRedis() as redis:
        prefill = WorkerProcess("prefill_worker", "p1", redis.url, tiny_model, folder)
        decode = WorkerProcess("decode_worker", "d1", redis.url, tiny_model, folder)
        try:
            prefill.start(
                *("--engine.kv_cache_bytes", "2MiB", "--handover.transports", "shm,gloo,grpc"),
                *("--engine.max_num_batched_tokens", str(CHUNK), "--lease.lease_s", "1", "--no-prefix_cache"),
            )
            yield Pair(prefill, decode, redis, tiny_model)
        finally:
            stop_all([prefill, decode])


async def growing_cache(call: Any) -> Any:
    """Reads a Prefill call up to the news that its cache grows."""
    assert (await call.read()).HasField("started")
    event = await call.read()
    assert event.HasField("growing_cache")
    assert event.growing_cache.is_growing
    return event.growing_cache


def open_decode(client: Client, attempt_id: str, kv: Any) -> Any:
    request = client.decode_request(attempt_id, _First(kv), max_tokens=MAX_TOKENS)
    return client.decode.Decode(request)


class _First:
    """What `decode_request` takes: a cache, and no first token yet."""

    def __init__(self, kv: Any) -> None:
        self.kv, self.token_id = kv, 0


async def generate(client: Client, attempt_id: str) -> tuple[list[int], Any]:
    """One request whose cache is taken over as it grows: its tokens, and the handover."""
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, PROMPT, max_tokens=MAX_TOKENS))
    decode = open_decode(client, attempt_id, await growing_cache(prefill))
    first = await client.first_token(prefill)
    tokens, position = [first.token_id], len(PROMPT) + 1
    events = [event async for event in decode]
    for event in events[1:-1]:
        assert event.tokens.first_position == position
        position += len(event.tokens.ids)
        tokens += event.tokens.ids
    assert events[-1].HasField("finished")
    assert (await prefill.read()).released.outcome == kv_transfer_pb2.LEASE_OUTCOME_CONSUMED
    return tokens, events[0].handover


async def whole(client: Client, attempt_id: str) -> list[int]:
    """The same request with a reader that waits for the whole cache."""
    answer = await client.generate(attempt_id, PROMPT, max_tokens=MAX_TOKENS)
    assert answer.decode_events[0].handover.num_parts == 1
    return answer.tokens


async def test_every_way_gives_the_tokens_of_a_cache_that_was_copied_whole(pair: Pair) -> None:
    all_tokens = []
    for way, block_size in (("grpc", 16), ("gloo", 24), ("shm", 16)):
        pair.decode.start(
            *("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8"),
            *("--handover.transports", way, "--engine.block_size", str(block_size)),
        )
        async with pair.client() as client:
            expected = await whole(client, f"{way}-whole")
            tokens, handover = await generate(client, f"{way}-growing")
            assert tokens == expected
            assert handover.transport == way
            assert handover.num_parts > 1  # all but the last were copied before the prompt was done
            others = await asyncio.gather(*(generate(client, f"{way}-{i}") for i in range(4)))
            all_tokens += [expected, *(each for each, _ in others)]
            await client.assert_all_free()
        if way != "shm":
            pair.decode.terminate()
            assert await asyncio.to_thread(pair.decode.wait) == 0
    assert all_tokens == all_tokens[:1] * 15


async def interrupted(pair: Pair, client: Client, attempt_id: str) -> tuple[Any, Any]:
    """A request in the middle of its prompt: the source's engine stands still, its reader has what was computed."""
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, PROMPT * 6, max_tokens=MAX_TOKENS))
    kv = await growing_cache(prefill)
    pair.prefill.freeze(server=False)
    decode = open_decode(client, attempt_id, kv)

    async def has_begun() -> bool:
        return (await client.status())[1].num_used_blocks > 0

    await client.eventually(has_begun)
    return prefill, decode


async def test_a_reader_that_leaves_early_does_not_stop_the_prompt(pair: Pair) -> None:
    async with pair.client() as client:
        prefill, decode = await interrupted(pair, client, "left")
        decode.cancel()

        async def has_left() -> bool:
            return (await client.status())[1].num_used_blocks == 0

        await client.eventually(has_left)
        pair.prefill.thaw()
        await client.first_token(prefill)
        assert (await prefill.read()).released.outcome == kv_transfer_pb2.LEASE_OUTCOME_ABANDONED
        await client.assert_all_free()


async def test_a_prompt_that_is_cancelled_ends_its_reader(pair: Pair) -> None:
    async with pair.client() as client:
        prefill, decode = await interrupted(pair, client, "gone")
        prefill.cancel()
        pair.prefill.thaw()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in decode:
                pass
        assert from_call(caught.value).reason == "LEASE_STALE"
        await client.assert_all_free()


async def test_a_first_token_that_is_the_last_ends_the_reader(pair: Pair) -> None:
    async with pair.client() as client:
        [first, *_] = await whole(client, "before")
        request = client.prefill_request("stops", PROMPT, max_tokens=MAX_TOKENS, stop_token_ids=[first])
        prefill = client.prefill.Prefill(request)
        decode = open_decode(client, "stops", await growing_cache(prefill))
        assert not (await client.first_token(prefill)).HasField("kv")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in decode:
                pass
        assert from_call(caught.value).reason == "LEASE_STALE"
        await client.assert_all_free()
