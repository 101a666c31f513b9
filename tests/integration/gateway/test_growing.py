"""The decode worker is asked as soon as a long prompt's first chunk is computed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from baton.core.errors import UnavailableError
from baton.v1 import common_pb2, gateway_pb2, prefill_pb2
from tests.integration.gateway.harness import Deployment, Options, eventually, lease_of
from tests.integration.gateway.test_failures import CODES, failure_of, refuse_full

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REQUEST = gateway_pb2.GenerateRequest(
    token_ids=common_pb2.TokenIds(ids=[5, 6, 7]), stop=common_pb2.StopConditions(max_tokens=4)
)


@pytest.fixture
def options() -> Options:
    return Options(max_retries=1)


class Chunks:
    """A prefill worker whose first chunk is computed, and that goes on when the test says so."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        deployment.script.prefill = self.prefill

    async def prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        kv = self.deployment.prefill.descriptor(request)
        kv.is_growing = True
        del kv.block_ids[:]
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        yield prefill_pb2.PrefillResponse(growing_cache=kv)
        await self.go_on.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        async for response in self.deployment.prefill.usual(request, context):
            if not response.HasField("started"):
                yield response


async def test_it_is_asked_before_the_first_token_and_once(deployment: Deployment) -> None:
    chunks = Chunks(deployment)
    call = deployment.stub.Complete(REQUEST)
    await eventually(lambda: deployment.decode.requests)
    [request] = deployment.decode.requests
    assert request.kv.is_growing
    assert request.kv.lease_id == lease_of(deployment.prefill.requests[0])
    assert request.first_token_id == 0
    chunks.go_on.set()
    answer = await call
    assert list(answer.token_ids) == [100, 101, 102, 103]
    assert len(deployment.decode.requests) == 1


async def wait_for_the_cache(request: Any, context: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


async def test_a_first_token_that_is_the_last_ends_its_call(deployment: Deployment) -> None:
    chunks = Chunks(deployment)
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5, 6, 7]), stop=common_pb2.StopConditions(max_tokens=4, token_ids=[100])
    )

    deployment.script.decode = wait_for_the_cache
    call = deployment.stub.Complete(request)
    await eventually(lambda: deployment.decode.num_active == 1)
    chunks.go_on.set()
    answer = await call
    assert list(answer.token_ids) == [100]
    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP


async def test_a_prompt_that_fails_ends_its_call_and_another_attempt_has_its_own(deployment: Deployment) -> None:
    chunks = Chunks(deployment)
    chunks.error = UnavailableError("the engine died", reason="ENGINE_DIED")
    call = deployment.stub.Complete(REQUEST)
    await eventually(lambda: deployment.decode.requests)
    chunks.go_on.set()
    answer = await call
    assert list(answer.token_ids) == [100, 101, 102, 103]
    first, second = deployment.decode.requests
    assert first.attempt_id != second.attempt_id
    assert first.kv.lease_id != second.kv.lease_id


async def test_a_refusal_is_told_after_the_first_token(deployment: Deployment) -> None:
    chunks = Chunks(deployment)
    deployment.script.decode = refuse_full
    call = deployment.stub.Generate(REQUEST)
    await eventually(lambda: deployment.decode.requests)
    chunks.go_on.set()
    assert await failure_of(call) == (CODES.RESOURCE_EXHAUSTED, "WORKER_FULL")


async def test_a_cancel_while_the_prompt_is_computed_ends_both_calls(deployment: Deployment) -> None:
    Chunks(deployment)
    deployment.script.decode = wait_for_the_cache
    call = deployment.stub.Generate(REQUEST)
    await eventually(lambda: deployment.decode.num_active == 1)
    call.cancel()
    await deployment.assert_idle()
