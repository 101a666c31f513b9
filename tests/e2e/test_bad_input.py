"""Bad input is refused at once by a typed error that names field and limit, and harms nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import gateway_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.v1 import gateway_pb2_grpc
    from baton.v1.gateway_pb2 import GenerateRequest
    from tests.e2e.conftest import System

CONTEXT = 8192
VOCABULARY = 49152
MESSAGE_LIMIT = 4 * 1024 * 1024


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    field: str
    limit: str


def request(**fields: object) -> GenerateRequest:
    return gateway_pb2.GenerateRequest(**fields)


def with_sampling(**fields: object) -> GenerateRequest:
    made = request(text="hello")
    for name, value in fields.items():
        setattr(made.sampling, name, value)
    return made


def with_max_tokens(max_tokens: int) -> GenerateRequest:
    made = request(text="hello")
    made.stop.max_tokens = max_tokens
    return made


INVALID, RANGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
CASES = {
    "no input": (request(), Refusal(INVALID, "text", "exactly one")),
    "empty prompt": (request(text=""), Refusal(INVALID, "text", "empty")),
    "empty ids": (request(token_ids={"ids": []}), Refusal(INVALID, "token_ids.ids", "empty")),
    "text and ids": (request(text="a", token_ids={"ids": [1]}), Refusal(INVALID, "token_ids", "text")),
    "id out of vocabulary": (
        request(token_ids={"ids": [5, 49152]}),
        Refusal(RANGE, "token_ids.ids[1]", str(VOCABULARY)),
    ),
    "prompt beyond the context": (
        request(token_ids={"ids": [5] * CONTEXT}),
        Refusal(RANGE, "token_ids.ids", str(CONTEXT)),
    ),
    "text beyond the context": (request(text="word " * 9000), Refusal(RANGE, "text", str(CONTEXT))),
    "max tokens beyond the context": (with_max_tokens(CONTEXT), Refusal(RANGE, "stop.max_tokens", "819")),
    "no tokens": (with_max_tokens(0), Refusal(INVALID, "stop.max_tokens", "1")),
    "temperature below 0": (with_sampling(temperature=-0.5), Refusal(INVALID, "sampling.temperature", "0")),
    "temperature no number": (with_sampling(temperature=float("nan")), Refusal(INVALID, "sampling.temperature", "0")),
    "top_p zero": (with_sampling(top_p=0.0), Refusal(INVALID, "sampling.top_p", "0")),
    "unknown model": (request(text="a", model="gpt-9"), Refusal(grpc.StatusCode.NOT_FOUND, "model", "SmolLM2")),
}


@pytest.fixture
async def channel(system: System) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(system.address, options=options) as opened:
        yield opened


async def status_of_both(stub: gateway_pb2_grpc.GatewayServiceAsyncStub) -> gateway_pb2.GetStatusResponse:
    """The status with both workers in it: one whose heartbeat is late is not listed until the next."""
    while len((status := await stub.GetStatus(gateway_pb2.GetStatusRequest())).workers) < 2:
        await asyncio.sleep(0.1)
    return status


@pytest.fixture(autouse=True)
async def system_is_unharmed(system: System, channel: grpc.aio.Channel) -> AsyncIterator[None]:
    """After each test the same processes answer, and nobody holds a block or a place in a queue."""
    stub = system.stub(channel)
    before = await status_of_both(stub)
    yield
    good = await stub.Complete(with_max_tokens(2))
    assert good.finished.usage.completion_tokens == 2
    for _ in range(100):
        after = await status_of_both(stub)
        if not after.num_active and not any(w.num_used_blocks for w in after.workers):
            break
        await asyncio.sleep(0.1)
    assert after.num_active == 0
    assert [w.num_used_blocks for w in after.workers] == [0, 0]
    assert [q.num_waiting for q in after.queues] == [0] * len(after.queues)
    assert {w.incarnation for w in after.workers} == {w.incarnation for w in before.workers}


def field_violations(error: grpc.aio.AioRpcError) -> list[tuple[str, str]]:
    status = rpc_status.from_call(error)
    assert status is not None
    found = []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found += [(violation.field, violation.description) for violation in bad.field_violations]
    return found


@pytest.mark.parametrize("name", CASES)
async def test_bad_requests_are_refused_by_name(system: System, channel: grpc.aio.Channel, name: str) -> None:
    bad, refusal = CASES[name]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await system.stub(channel).Complete(bad)
    assert caught.value.code() is refusal.code
    assert refusal.limit in caught.value.details()
    if refusal.code is grpc.StatusCode.NOT_FOUND:
        assert refusal.field in caught.value.details()
    else:
        violations = field_violations(caught.value)
        assert [field for field, _ in violations] == [refusal.field]
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        async for _ in system.stub(channel).Generate(bad):
            pass
    assert streamed.value.code() is refusal.code


async def test_text_that_is_no_utf8_names_its_field(channel: grpc.aio.Channel) -> None:
    call = channel.unary_unary("/baton.v1.GatewayService/Complete")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\x1a\x02\xff\xfe")  # field 3, `text`, of two bytes that begin no character
    assert caught.value.code() is INVALID
    assert [field for field, _ in field_violations(caught.value)] == ["text"]


async def test_a_huge_message_is_refused_with_its_limit(system: System, channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await system.stub(channel).Complete(request(text="x" * 100_000_000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MESSAGE_LIMIT) in caught.value.details()
