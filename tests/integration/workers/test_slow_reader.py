"""A reader that does not read stops its own sequence: the worker goes on with all others, and with it when it reads."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.v1 import decode_pb2_grpc
from tests.integration.workers.conftest import NUM_SEATS
from tests.integration.workers.harness import SMALL_WINDOW

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.workers.harness import Client

PROMPT = [3, 1, 4, 1, 5]
NUM_TOKENS = 1500


@asynccontextmanager
async def unread(client: Client, attempt_id: str) -> AsyncIterator[Any]:
    """A decode call of 1,500 tokens that nobody has read from."""
    address = client.views["d1"].record.address
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, PROMPT, max_tokens=NUM_TOKENS))
    first = await client.first_token(prefill)
    async with grpc.aio.insecure_channel(address, options=SMALL_WINDOW) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        yield stub.Decode(client.decode_request(attempt_id, first, max_tokens=NUM_TOKENS))


async def is_parked(client: Client) -> bool:
    """Nothing is computed, and blocks are held."""
    _, decode = await client.status()
    return decode.num_running == 0 and decode.num_waiting == 0 and decode.num_used_blocks > 0


@asynccontextmanager
async def all_seats_taken(client: Client) -> AsyncIterator[list[Any]]:
    """Decode calls that nobody reads, as many as may run: they are parked and keep their seats for ever."""
    async with AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(unread(client, f"hog-{index}")) for index in range(NUM_SEATS)]
        for call in calls:
            assert (await call.read()).HasField("handover")
        await client.eventually(lambda: is_parked(client))
        yield calls


async def test_it_leaves_the_batch_and_comes_back_when_it_is_read(pair):
    async with pair.client() as client:
        whole = (await client.generate("whole", PROMPT, max_tokens=NUM_TOKENS)).tokens
        async with unread(client, "slow") as call:
            await client.eventually(lambda: is_parked(client))
            # Others are not concerned.
            quick = await client.generate("quick", PROMPT, max_tokens=40)
            assert quick.tokens == whole[:40]
            await client.eventually(lambda: is_parked(client))
            tokens = []
            async for event in call:
                tokens += event.tokens.ids
        assert tokens == whole[1:]
        await client.assert_all_free()


@pytest.mark.parametrize("end", ["cancel", "channel closed"])
async def test_one_that_is_never_read_holds_nothing_after_its_end(pair, end):
    async with pair.client() as client:
        async with unread(client, f"never-{end.split()[0]}") as call:
            await client.eventually(lambda: is_parked(client))
            if end == "cancel":
                call.cancel()
                await client.assert_all_free()
        await client.assert_all_free()
