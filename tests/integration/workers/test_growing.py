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
# Of so many chunks that its engine can be stopped in the middle of them.
LONG_PROMPT = PROMPT * 6
MAX_TOKENS = 12
# Who is faster is not the tests' to say: what only overlaps by chance is tried again, so often at most.
MAX_TRIES = 100


@pytest.fixture(scope="module")
def module_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker of small steps, and a decode worker that nobody has started."""
    folder = tmp_path_factory.mktemp("logs")
    with EmbeddedRedis() as redis:
        prefill = WorkerProcess("prefill_worker", "p1", redis.url, tiny_model, folder)
        decode = WorkerProcess("decode_worker", "d1", redis.url, tiny_model, folder)
        try:
            prefill.start(
                *("--engine.kv_cache_bytes", "2MiB", "--handover.transports", "shm,gloo,grpc"),
                *("--engine.max_num_batched_tokens", str(CHUNK), "--no-prefix_cache"),
            )
            yield Pair(prefill, decode, redis, tiny_model)
        finally:
            stop_all([prefill, decode])


@pytest.fixture
def pair(module_pair: Pair) -> Iterator[Pair]:
    """Both workers running."""
    if not module_pair.decode.is_running:
        start_reader(module_pair)
    yield module_pair
    module_pair.prefill.thaw()


def start_reader(pair: Pair, way: str = "shm", block_size: int = 16) -> None:
    pair.decode.start(
        *("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8"),
        *("--handover.transports", way, "--engine.block_size", str(block_size)),
    )


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


async def half_computed(pair: Pair, client: Client, attempt_id: str, **changes: Any) -> tuple[Any, Any]:
    """A request whose engine stands still in the middle of its prompt, and its reader, which has its blocks."""
    fields = {"max_tokens": MAX_TOKENS} | changes
    for number in range(MAX_TRIES):
        name = f"{attempt_id}-{number}"
        prefill = client.prefill.Prefill(client.prefill_request(name, LONG_PROMPT, **fields))
        kv = await growing_cache(prefill)
        pair.prefill.freeze(server=False)
        decode = open_decode(client, name, kv)

        async def has_begun() -> bool:
            source, reader = await client.status()
            return source.num_running == 0 or reader.num_used_blocks > 0

        await client.eventually(has_begun)
        # All that the engine told before it stood still is known by now: a prompt that was done would not run.
        if (await client.status())[0].num_running == 1:
            return prefill, decode
        pair.prefill.thaw()
        decode.cancel()
        prefill.cancel()
        await client.assert_all_free()
    raise AssertionError(f"{MAX_TRIES} prompts were done before their engine could be stopped")


async def generate(client: Client, attempt_id: str) -> list[int]:
    """The tokens of a request whose cache is taken over as it grows."""
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, PROMPT, max_tokens=MAX_TOKENS))
    decode = open_decode(client, attempt_id, await growing_cache(prefill))
    tokens, _ = await finish(client, prefill, decode, len(PROMPT))
    return tokens


async def finish(client: Client, prefill: Any, decode: Any, num_prompt_tokens: int) -> tuple[list[int], Any]:
    """Reads both streams to their ends: the tokens, and the handover."""
    first = await client.first_token(prefill)
    tokens, position = [first.token_id], num_prompt_tokens + 1
    events = [event async for event in decode]
    for event in events[1:-1]:
        assert event.tokens.first_position == position
        position += len(event.tokens.ids)
        tokens += event.tokens.ids
    assert events[-1].HasField("finished")
    assert (await prefill.read()).released.outcome == kv_transfer_pb2.LEASE_OUTCOME_CONSUMED
    return tokens, events[0].handover


async def whole(client: Client, attempt_id: str, prompt: list[int]) -> list[int]:
    """The same request with a reader that waits for the whole cache."""
    answer = await client.generate(attempt_id, prompt, max_tokens=MAX_TOKENS)
    assert answer.decode_events[0].handover.num_parts == 1
    return answer.tokens


async def in_parts(pair: Pair, client: Client, attempt_id: str) -> tuple[list[int], Any]:
    """The tokens and the handover of a long prompt that was copied in parts, all but the last before it was done.

    A reader that hears of the first blocks late gets all at once.
    """
    for number in range(MAX_TRIES):
        calls = await half_computed(pair, client, f"{attempt_id}-{number}")
        pair.prefill.thaw()
        tokens, handover = await finish(client, *calls, len(LONG_PROMPT))
        if handover.num_parts > 1:
            return tokens, handover
    raise AssertionError(f"{MAX_TRIES} caches were copied whole")


async def test_every_way_gives_the_tokens_of_a_cache_that_was_copied_whole(module_pair: Pair) -> None:
    pair, all_tokens, all_long_tokens = module_pair, [], []
    pair.decode.stop()
    for way, block_size in (("grpc", 16), ("gloo", 24), ("shm", 16)):
        start_reader(pair, way, block_size)
        async with pair.client() as client:
            all_tokens.append(await whole(client, f"{way}-whole", PROMPT))
            all_long_tokens.append(await whole(client, f"{way}-long", LONG_PROMPT))
            tokens, handover = await in_parts(pair, client, f"{way}-parts")
            assert handover.transport == way
            all_long_tokens.append(tokens)
            all_tokens += await asyncio.gather(*(generate(client, f"{way}-{i}") for i in range(4)))
            await client.assert_all_free()
        if way != "shm":
            pair.decode.terminate()
            assert await asyncio.to_thread(pair.decode.wait) == 0
    assert all_tokens == all_tokens[:1] * 15
    assert all_long_tokens == all_long_tokens[:1] * 6


async def test_a_reader_that_leaves_early_does_not_stop_the_prompt(pair: Pair) -> None:
    async with pair.client() as client:
        prefill, decode = await half_computed(pair, client, "left")
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
        prefill, decode = await half_computed(pair, client, "gone")
        prefill.cancel()
        pair.prefill.thaw()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in decode:
                pass
        assert from_call(caught.value).reason == "LEASE_STALE"
        await client.assert_all_free()


async def test_a_first_token_that_is_the_last_ends_the_reader(pair: Pair) -> None:
    async with pair.client() as client:
        [first, *_] = await whole(client, "before", LONG_PROMPT)
        prefill, decode = await half_computed(pair, client, "stops", stop_token_ids=[first])
        pair.prefill.thaw()
        assert not (await client.first_token(prefill)).HasField("kv")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in decode:
                pass
        assert from_call(caught.value).reason == "LEASE_STALE"
        await client.assert_all_free()
