"""What breaks on a request's way, injected at each point: the client gets a typed error, and nothing stays held."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.coordination.keys import Keys
from baton.core.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc, prefill_pb2
from tests.integration.gateway.harness import (
    Deployment,
    Options,
    deployed,
    events_of,
    eventually,
    finished,
    handover,
    ids_of,
    text_of,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.coordination.embedded import EmbeddedRedis
    from gateway.served_model import ServedModel
    from gateway.tokenization import Tokenizer
    from tests.fixtures.redis import PrivateRedis

PROMPT = gateway_pb2.GenerateRequest(text="The sky")
CODES = grpc.StatusCode


async def failure_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and reason with which a stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await events_of(call)
    return caught.value.code(), from_call(caught.value).reason


# --- refusals and deaths of workers -----------------------------------------------------------------------------


async def refuse_fitting(request: Any, context: Any) -> AsyncIterator[Any]:
    raise FailedPreconditionError("weights differ", reason="FINGERPRINT_MISMATCH")
    yield


async def refuse_full(request: Any, context: Any) -> AsyncIterator[Any]:
    raise ResourceExhaustedError("no slot", reason="WORKER_FULL", retry_after_s=0.5)
    yield


async def refuse_draining(request: Any, context: Any) -> AsyncIterator[Any]:
    raise UnavailableError("draining", reason="DRAINING")
    yield


async def crash(request: Any, context: Any) -> AsyncIterator[Any]:
    raise RuntimeError("a bug")
    yield


async def end_at_once(request: Any, context: Any) -> AsyncIterator[Any]:
    return
    yield


async def end_itself_as_cancelled(request: Any, context: Any) -> AsyncIterator[Any]:
    await context.abort(CODES.CANCELLED, "the worker stops")
    yield


REFUSALS = [
    pytest.param(refuse_fitting, (CODES.UNAVAILABLE, "WORKER_LOST"), id="does-not-fit"),
    pytest.param(refuse_full, (CODES.RESOURCE_EXHAUSTED, "WORKER_FULL"), id="full"),
    pytest.param(refuse_draining, (CODES.UNAVAILABLE, "WORKER_LOST"), id="draining"),
    pytest.param(crash, (CODES.INTERNAL, "INTERNAL"), id="crash"),
    pytest.param(end_at_once, (CODES.UNAVAILABLE, "WORKER_LOST"), id="ends-at-once"),
    pytest.param(end_itself_as_cancelled, (CODES.UNAVAILABLE, "WORKER_LOST"), id="cancels"),
]


@pytest.mark.parametrize(("script", "expected"), REFUSALS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_refusing_worker(deployment: Deployment, role: str, script: Any, expected: Any) -> None:
    setattr(deployment.script, role, script)
    assert await failure_of(deployment.stub.Generate(PROMPT)) == expected
    assert deployment.metric("baton_requests_total", outcome=expected[1].lower()) == 1
    await deployment.assert_idle()
    # The service is unharmed.
    setattr(deployment.script, role, None)
    await deployment.stub.Complete(PROMPT)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_dies_in_the_middle(deployment: Deployment, role: str) -> None:
    reached = asyncio.Event()

    async def stall(request: Any, context: Any) -> AsyncIterator[Any]:
        if role == "prefill":
            yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        else:
            yield handover()
            deployment.decode.release(request)
            yield tokens(request.kv.num_tokens + 1, 101)
        reached.set()
        await asyncio.Event().wait()

    setattr(deployment.script, role, stall)
    call = deployment.stub.Generate(PROMPT)
    failure = asyncio.gather(failure_of(call))
    async with asyncio.timeout(20):
        await reached.wait()
    await (deployment.prefill_server if role == "prefill" else deployment.decode_server).drain(0.0)
    assert await failure == [(CODES.UNAVAILABLE, "WORKER_LOST")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nobody_listens_at_a_workers_address(deployment: Deployment, role: str) -> None:
    await (deployment.prefill_server if role == "prefill" else deployment.decode_server).drain(0.0)
    assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.UNAVAILABLE, "WORKER_LOST")


async def test_death_of_the_prefill_worker_after_the_handover_harms_nobody(deployment: Deployment) -> None:
    gate = asyncio.Event()

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        await gate.wait()
        yield tokens(request.kv.num_tokens + 1, *deployment.script.answer[1:])
        yield finished()

    deployment.script.decode = decode
    call = deployment.stub.Generate(PROMPT)
    await call.read()
    await eventually(lambda: deployment.decode.num_active == 1)
    await deployment.prefill_server.drain(0.0)
    gate.set()
    events = await events_of(call)
    assert events[-1].HasField("finished")


# --- workers that break the contract ----------------------------------------------------------------------------


async def short_cache(deployment: Deployment, request: Any) -> AsyncIterator[Any]:
    kv = deployment.prefill.descriptor(request)
    kv.num_tokens -= 1
    yield deployment.prefill.first_token(request, kv=kv)


async def cache_of_a_finished_request(deployment: Deployment, request: Any) -> AsyncIterator[Any]:
    kv = deployment.prefill.descriptor(request)
    yield deployment.prefill.first_token(request, kv=kv, finish_reason=common_pb2.FINISH_REASON_STOP)


async def released_before_first_token(deployment: Deployment, request: Any) -> AsyncIterator[Any]:
    yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())


@pytest.mark.parametrize("script", [short_cache, cache_of_a_finished_request, released_before_first_token])
async def test_a_prefill_worker_that_breaks_the_contract(deployment: Deployment, script: Any) -> None:
    deployment.script.prefill = lambda request, context: script(deployment, request)
    assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.INTERNAL, "WORKER_PROTOCOL")


async def gap(start: int) -> AsyncIterator[Any]:
    yield handover()
    yield tokens(start, 101)
    yield tokens(start + 2, 102)


async def repetition(start: int) -> AsyncIterator[Any]:
    yield handover()
    yield tokens(start, 101, 102)
    yield tokens(start + 1, 102)


async def first_token_again(start: int) -> AsyncIterator[Any]:
    yield handover()
    yield tokens(start - 1, 100, 101)


async def tokens_before_handover(start: int) -> AsyncIterator[Any]:
    yield tokens(start, 101)


async def end_before_handover(start: int) -> AsyncIterator[Any]:
    yield finished()


async def two_handovers(start: int) -> AsyncIterator[Any]:
    yield handover()
    yield handover()


async def too_many_tokens(start: int) -> AsyncIterator[Any]:
    yield handover()
    yield tokens(start, *range(100, 120))


@pytest.mark.parametrize(
    "script",
    [
        gap,
        repetition,
        first_token_again,
        tokens_before_handover,
        end_before_handover,
        two_handovers,
        too_many_tokens,
    ],
)
async def test_a_decode_worker_that_breaks_the_contract(deployment: Deployment, script: Any) -> None:
    deployment.script.decode = lambda request, context: script(request.kv.num_tokens + 1)
    request = gateway_pb2.GenerateRequest(text="The sky", stop=common_pb2.StopConditions(max_tokens=6))
    assert await failure_of(deployment.stub.Generate(request)) == (CODES.INTERNAL, "WORKER_PROTOCOL")


async def test_a_decode_stream_without_an_end(deployment: Deployment) -> None:
    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        yield tokens(request.kv.num_tokens + 1, 101)

    deployment.script.decode = decode
    assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.UNAVAILABLE, "WORKER_LOST")


# --- deadlines and cancellation ---------------------------------------------------------------------------------


def stalling(deployment: Deployment, point: str) -> asyncio.Event:
    """Makes the request stop at a point of its way; the event says that it is there."""
    reached = asyncio.Event()

    async def prefill(request: Any, context: Any) -> AsyncIterator[Any]:
        reached.set()
        await asyncio.Event().wait()
        yield

    async def handing_over(request: Any, context: Any) -> AsyncIterator[Any]:
        reached.set()
        await asyncio.Event().wait()
        yield

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        deployment.decode.release(request)
        yield tokens(request.kv.num_tokens + 1, 101)
        reached.set()
        await asyncio.Event().wait()

    if point == "prefill":
        deployment.script.prefill = prefill
    else:
        deployment.script.decode = {"handover": handing_over, "decode": decode}[point]
    return reached


@pytest.mark.parametrize("point", ["prefill", "handover", "decode"])
async def test_a_deadline_that_passes_at_a_worker(deployment: Deployment, point: str) -> None:
    stalling(deployment, point)
    code, _ = await failure_of(deployment.stub.Generate(PROMPT, timeout=0.6))
    assert code is CODES.DEADLINE_EXCEEDED
    await deployment.assert_idle()


@pytest.mark.parametrize("point", ["prefill", "handover", "decode"])
async def test_a_cancel_that_comes_at_a_worker(deployment: Deployment, point: str) -> None:
    reached = stalling(deployment, point)
    call = deployment.stub.Generate(PROMPT)
    async with asyncio.timeout(20):
        await reached.wait()
    call.cancel()
    await deployment.assert_idle()
    assert deployment.metric("baton_requests_total", outcome="cancelled") == 1


async def test_a_cancel_in_the_queue(deployment: Deployment) -> None:
    stalling(deployment, "prefill")
    running = [deployment.stub.Generate(PROMPT) for _ in range(4)]
    await eventually(lambda: deployment.prefill.num_active == 4)
    waiting = deployment.stub.Generate(PROMPT)
    await waiting.read()
    assert deployment.metric("baton_num_requests_waiting", queue_class="chat") == 1
    waiting.cancel()
    await eventually(lambda: deployment.metric("baton_num_requests_waiting", queue_class="chat") == 0)
    await eventually(lambda: deployment.queue.num_live == 4)
    for call in running:
        call.cancel()


async def test_a_cancelled_unary_call(deployment: Deployment) -> None:
    reached = stalling(deployment, "decode")
    call = deployment.stub.Complete(PROMPT)
    async with asyncio.timeout(20):
        await reached.wait()
    call.cancel()
    await deployment.assert_idle()


async def test_workers_get_the_deadline_less_a_margin(deployment: Deployment) -> None:
    left: dict[str, float] = {}

    async def prefill(request: Any, context: Any) -> AsyncIterator[Any]:
        left["prefill"] = context.time_remaining()
        async for response in deployment.prefill.usual(request, context):
            yield response

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        left["decode"] = context.time_remaining()
        async for response in deployment.decode.usual(request, context):
            yield response

    deployment.script.prefill, deployment.script.decode = prefill, decode
    await deployment.stub.Complete(PROMPT, timeout=10)
    # gRPC rounds a deadline on the wire up, here to a tenth of a second at most.
    assert 5 < left["decode"] <= left["prefill"] + 0.01 < 10.06
    await deployment.stub.Complete(PROMPT)
    # No deadline of the client: the gateway's own limit.
    assert 15 < left["decode"] < 20.1


async def test_the_gateways_own_limit_ends_a_request(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer
) -> None:
    async with deployed(redis_server.url, model, tokenizer, Options(request_timeout_s=0.5)) as deployment:
        stalling(deployment, "decode")
        code, reason = await failure_of(deployment.stub.Generate(PROMPT))
        assert (code, reason) == (CODES.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        await deployment.assert_idle()


async def test_a_client_that_does_not_read_holds_back_its_own_stream_only(deployment: Deployment) -> None:
    """Once the connection's buffers are full, the gateway stops reading the worker's stream; other requests go on."""
    num_tokens = 6000

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        deployment.decode.release(request)
        start = request.kv.num_tokens + 1
        for position in range(start, start + request.max_tokens - 1):
            yield tokens(position, 101)
        yield finished()

    async def is_held_back() -> bool:
        before = deployment.metric("baton_generation_tokens_total")
        await asyncio.sleep(0.3)
        return before == deployment.metric("baton_generation_tokens_total")

    deployment.script.decode = decode
    small_buffers = [("grpc.http2.lookahead_bytes", 16_384), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(deployment.address, options=small_buffers) as channel:
        request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(max_tokens=num_tokens))
        slow = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
        await slow.read()
        await eventually(is_held_back)
        assert deployment.metric("baton_generation_tokens_total") < num_tokens
        other = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(max_tokens=3))
        await asyncio.gather(*(deployment.stub.Complete(other) for _ in range(3)))
        events = await events_of(slow)
    assert events[-1].finished.usage.completion_tokens == num_tokens
    assert text_of(events) == deployment.tokenizer.decode([100] + [101] * (num_tokens - 1))


# --- the queue and the fleet ------------------------------------------------------------------------------------


async def test_no_pair_of_workers_is_said_at_once(deployment: Deployment) -> None:
    [prefill, decode] = deployment.records
    deployment.records[:] = [prefill]
    await deployment.registry.deregister(decode.worker_id, decode.incarnation)
    await eventually(lambda: len(deployment.queue.views) == 1)
    async with asyncio.timeout(10):  # sooner than the queue would give up
        assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.UNAVAILABLE, "NO_WORKER")


async def test_a_pair_that_is_just_there_serves_before_the_gateway_looks_again(deployment: Deployment) -> None:
    [prefill, decode] = deployment.records
    for life in range(2, 6):  # in one of them the gateway may happen to look in between
        deployment.records[:] = [prefill]
        await deployment.registry.deregister(decode.worker_id, decode.incarnation)
        await eventually(lambda: len(deployment.queue.views) == 1)
        decode = dataclasses.replace(decode, incarnation=f"d-life{life}")
        deployment.records[:] = [prefill, decode]
        await deployment.beat()
        assert (await deployment.stub.Complete(PROMPT)).finished.usage.completion_tokens > 0


async def test_a_wait_in_the_queue_has_an_end(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer
) -> None:
    async with deployed(redis_server.url, model, tokenizer, Options(queue_timeout_s=1.0)) as deployment:
        stalling(deployment, "prefill")
        running = [deployment.stub.Generate(PROMPT) for _ in range(4)]
        await eventually(lambda: deployment.prefill.num_active == 4)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await deployment.stub.Complete(PROMPT)
        error = from_call(caught.value)
        assert (caught.value.code(), error.reason) == (CODES.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT")
        assert error.retry_after_s > 0
        for call in running:
            call.cancel()
        await deployment.assert_idle()


async def occupied(deployment: Deployment, interval_ms: int) -> list[Any]:
    """Four requests that run and two that wait, in a class that was measured to move once in `interval_ms`."""
    stalling(deployment, "prefill")
    running = [deployment.stub.Generate(PROMPT) for _ in range(4)]
    await eventually(lambda: deployment.prefill.num_active == 4)
    load = Keys("test", deployment.model.name).all[10]
    fields = {"interval:chat": str(interval_ms), "granted_at:chat": "0"}
    await deployment.connection.commands.hset(load, mapping=fields)
    waiting = []
    for _ in range(2):
        waiting.append(deployment.stub.Generate(PROMPT))
        await waiting[-1].read()
    return running + waiting


async def test_a_deadline_that_the_queue_cannot_meet_is_refused_at_once(deployment: Deployment) -> None:
    others = await occupied(deployment, 6000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(PROMPT, timeout=10.0)
    error = from_call(caught.value)
    assert (caught.value.code(), error.reason) == (CODES.RESOURCE_EXHAUSTED, "DEADLINE_UNMEETABLE")
    # gRPC rounds a deadline of ten seconds on the wire up, to a tenth of a second.
    assert 1.9 <= error.retry_after_s < 10.0
    pushback = dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]
    assert int(pushback) == pytest.approx(error.retry_after_s * 1000, abs=1)
    in_time = deployment.stub.Generate(PROMPT, timeout=18.0)
    accepted = (await in_time.read()).accepted
    assert (accepted.queue_position, accepted.predicted_wait_s) == (2, 12.0)
    for call in [*others, in_time]:
        call.cancel()


async def test_a_request_that_expires_in_the_queue_is_never_computed(deployment: Deployment) -> None:
    others = await occupied(deployment, 1)
    call = deployment.stub.Generate(PROMPT, timeout=1.0)
    assert await failure_of(call) in [(CODES.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")]
    for other in others:
        other.cancel()
    await deployment.assert_idle()
    assert len(deployment.prefill.requests) <= 6


async def test_a_request_that_runs_is_not_run_again(deployment: Deployment) -> None:
    stalling(deployment, "prefill")
    request = gateway_pb2.GenerateRequest(text="The sky", request_id="mine")
    call = deployment.stub.Generate(request)
    await eventually(lambda: deployment.prefill.num_active == 1)
    assert await failure_of(deployment.stub.Generate(request)) == (CODES.ALREADY_EXISTS, "REQUEST_ID_LIVE")
    call.cancel()
    await deployment.assert_idle()
    deployment.script.prefill = None
    await deployment.stub.Complete(request)


async def test_a_client_that_does_not_read_stops_only_its_own_worker_stream(deployment: Deployment) -> None:
    sent: dict[str, int] = {}

    async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        deployment.decode.release(request)
        for position in range(request.kv.num_tokens + 1, request.kv.num_tokens + request.max_tokens):
            yield tokens(position, 101)
            sent[request.attempt_id] = sent.get(request.attempt_id, 0) + 1
        yield finished()

    deployment.script.decode = endless
    request = gateway_pb2.GenerateRequest(
        text="The sky", stop=common_pb2.StopConditions(max_tokens=3000, ignore_eos=True)
    )
    small_window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(deployment.address, options=small_window) as channel:
        unread = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
        await eventually(lambda: sent)
        (slow,) = sent
        # Others run to their ends meanwhile, far beyond where this one stands.
        answer = await deployment.stub.Complete(request)
        assert len(answer.token_ids) == 3000
        held_at = 0
        while sent[slow] > held_at:  # until a whole answer passes it by
            held_at = sent[slow]
            assert held_at < 1000
            await deployment.stub.Complete(request)
        # When it reads, nothing is missing.
        assert len(ids_of(await events_of(unread))) == 3000


async def test_a_class_bounds_the_life_of_its_requests(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer
) -> None:
    options = Options(class_timeout_s={"chat": 0.4})
    async with deployed(redis_server.url, model, tokenizer, options) as deployment:
        stalling(deployment, "prefill")
        assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        await deployment.assert_idle()


async def test_a_request_that_no_worker_could_ever_hold_does_not_block_its_class(deployment: Deployment) -> None:
    deployment.records[1] = dataclasses.replace(deployment.records[1], num_blocks=4, incarnation="life2")
    await deployment.announce()
    await eventually(lambda: any(view.record.num_blocks == 4 for view in deployment.queue.views))
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5] * 40), stop=common_pb2.StopConditions(max_tokens=25)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(request)
    error = from_call(caught.value)
    assert caught.value.code() is CODES.OUT_OF_RANGE
    assert (error.field, error.limit) == ("stop.max_tokens", 24)
    request.stop.max_tokens = 24
    await deployment.stub.Complete(request)


async def test_without_redis_admissions_stop_and_running_streams_do_not(
    private_redis: PrivateRedis, model: ServedModel, tokenizer: Tokenizer
) -> None:
    gate = asyncio.Event()
    async with deployed(private_redis.url, model, tokenizer, Options(call_timeout_s=1.0)) as deployment:

        async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
            yield handover()
            deployment.decode.release(request)
            await gate.wait()
            yield tokens(request.kv.num_tokens + 1, *deployment.script.answer[1:])
            yield finished()

        deployment.script.decode = decode
        call = deployment.stub.Generate(PROMPT)
        await call.read()
        await eventually(lambda: deployment.decode.num_active == 1)
        private_redis.pause()
        await eventually(lambda: not deployment.queue.is_available)
        assert await failure_of(deployment.stub.Generate(PROMPT)) == (CODES.UNAVAILABLE, "REDIS_UNAVAILABLE")
        gate.set()
        assert (await events_of(call))[-1].HasField("finished")
        private_redis.resume()
        await eventually(lambda: deployment.queue.is_available)
        await deployment.announce()
        await deployment.stub.Complete(PROMPT)
