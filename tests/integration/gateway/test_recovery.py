"""A worker is lost in the middle of a request: the client's stream goes on, and no token comes twice or never."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.core.errors import UnavailableError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, decode_pb2, gateway_pb2, prefill_pb2
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
from tests.integration.gateway.test_failures import failure_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.coordination.embedded import EmbeddedRedis
    from gateway.served_model import ServedModel
    from gateway.tokenization import Tokenizer

ANSWER = [100, 101, 102, 103, 104, 105, 106, 107]
IDS = [5, 6, 7]
REQUEST = gateway_pb2.GenerateRequest(
    token_ids=common_pb2.TokenIds(ids=IDS), stop=common_pb2.StopConditions(max_tokens=len(ANSWER))
)
CODES = grpc.StatusCode


@pytest.fixture
def options() -> Options:
    return Options(max_retries=2)


@pytest.fixture
async def deployment(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer, options: Options
) -> AsyncIterator[Deployment]:
    """Two workers of each role, behind one address each; after the test nothing may be held."""
    async with deployed(redis_server.url, model, tokenizer, options) as parts:
        parts.script.answer = ANSWER
        parts.records += [
            dataclasses.replace(each, worker_id=f"{each.worker_id}b", incarnation=f"{each.incarnation}b")
            for each in parts.records
        ]
        await parts.announce()
        yield parts
        await parts.assert_idle()


class Losses:
    """Hooks that lose a worker at a point of the first attempts, and let the next one run as usual."""

    def __init__(self, deployment: Deployment, point: str, times: int = 1) -> None:
        self.deployment = deployment
        self.point = point
        self.left = times
        role = "prefill" if "prompt" in point else "decode"
        setattr(deployment.script, role, getattr(self, role))

    async def prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.left:
            self.left -= 1
            if self.point == "within the prompt":
                yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
            raise UnavailableError("the engine died", reason="ENGINE_DIED")
        async for response in self.deployment.prefill.usual(request, context):
            yield response

    async def decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if not self.left:
            async for response in self.deployment.decode.usual(request, context):
                yield response
            return
        self.left -= 1
        if self.point == "instead of the handover":
            raise UnavailableError("the source is gone", reason="PEER_GONE")
        if self.point != "before the handover":
            yield handover()
            self.deployment.decode.release(request)
        if self.point == "within the output":
            done = len(request.output_token_ids) + 1
            yield tokens(request.kv.num_tokens + 1, ANSWER[done])
            yield tokens(request.kv.num_tokens + 2, ANSWER[done + 1])
        raise UnavailableError("the engine died", reason="ENGINE_DIED")


POINTS = {
    "before the prompt": 0,
    "within the prompt": 0,
    "instead of the handover": 1,
    "before the handover": 1,
    "after the handover": 1,
    "within the output": 3,
}


@pytest.mark.parametrize("point", POINTS)
async def test_the_stream_goes_on(deployment: Deployment, point: str) -> None:
    Losses(deployment, point)
    events = await events_of(deployment.stub.Generate(REQUEST))
    assert ids_of(events) == ANSWER
    assert text_of(events) == deployment.tokenizer.decode(ANSWER)
    assert [event.WhichOneof("event") for event in events].count("finished") == 1
    usage = events[-1].finished.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (len(IDS), len(ANSWER), 2)
    first, second = deployment.prefill.requests
    assert first.attempt_id != second.attempt_id
    assert (first.num_output_tokens, second.num_output_tokens) == (0, POINTS[point])
    assert list(second.token_ids) == IDS + ANSWER[: POINTS[point]]
    assert second.max_tokens == first.max_tokens
    last = deployment.decode.requests[-1]
    assert last.attempt_id == second.attempt_id
    assert list(last.output_token_ids) == ANSWER[: POINTS[point]]
    role = "prefill" if "prompt" in point or "instead" in point else "decode"
    assert deployment.metric("baton_retries_total", role=role) == 1
    assert deployment.metric("baton_generation_tokens_total") == len(ANSWER)
    assert deployment.metric("baton_requests_total", outcome="length") == 1


async def test_two_losses_in_one_stream(deployment: Deployment) -> None:
    Losses(deployment, "within the output", times=2)
    events = await events_of(deployment.stub.Generate(REQUEST))
    assert ids_of(events) == ANSWER
    assert [request.num_output_tokens for request in deployment.prefill.requests] == [0, 3, 6]


async def test_a_request_that_loses_worker_after_worker_ends(deployment: Deployment) -> None:
    Losses(deployment, "before the handover", times=99)
    call = deployment.stub.Generate(REQUEST)
    assert await failure_of(call) == (CODES.UNAVAILABLE, "WORKER_LOST")
    assert len(deployment.prefill.requests) == 3
    assert deployment.metric("baton_requests_total", outcome="worker_lost") == 1


async def test_a_full_worker_is_no_lost_one(deployment: Deployment) -> None:
    from tests.integration.gateway.test_failures import refuse_full

    deployment.script.decode = refuse_full
    assert await failure_of(deployment.stub.Generate(REQUEST)) == (CODES.RESOURCE_EXHAUSTED, "WORKER_FULL")
    assert len(deployment.prefill.requests) == 1


async def test_nothing_is_computed_again_for_a_worker_that_dies_after_the_last_token(deployment: Deployment) -> None:
    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        deployment.decode.release(request)
        yield decode_pb2.DecodeResponse(
            tokens=decode_pb2.DecodedTokens(
                first_position=request.kv.num_tokens + 1, ids=[101, 102], finish_reason=common_pb2.FINISH_REASON_STOP
            )
        )
        raise UnavailableError("the engine died", reason="ENGINE_DIED")

    deployment.script.decode = decode
    answer = await deployment.stub.Complete(REQUEST)
    assert list(answer.token_ids) == [100, 101, 102]
    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
    assert len(deployment.prefill.requests) == 1


async def alone(deployment: Deployment) -> None:
    """Takes the second worker of each role away."""
    for each in deployment.records[2:]:
        await deployment.registry.deregister(each.worker_id, each.incarnation)
    del deployment.records[2:]
    await eventually(lambda: len(deployment.queue.views) == 2)


async def test_a_worker_that_was_lost_and_still_beats_is_asked_again(deployment: Deployment) -> None:
    await alone(deployment)
    Losses(deployment, "within the output")
    assert ids_of(await events_of(deployment.stub.Generate(REQUEST))) == ANSWER


async def test_the_only_worker_comes_back_in_another_life(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.attempts._DOUBT_S", 1000.0)  # it does not wait until the old life is believed in again
    await alone(deployment)
    Losses(deployment, "within the output")
    call = deployment.stub.Generate(REQUEST)
    events = [await call.read() for _ in range(4)]
    await eventually(lambda: deployment.metric("baton_retries_total", role="decode") == 1)
    assert deployment.metric("baton_num_requests_waiting", queue_class="chat") == 1
    deployment.records[1] = dataclasses.replace(deployment.records[1], incarnation="another")
    await deployment.announce()
    events += await events_of(call)
    assert ids_of(events) == ANSWER


async def test_a_worker_that_does_not_come_back_in_time_is_told_with_the_time(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer
) -> None:
    options = Options(max_retries=1, queue_timeout_s=1.0)
    async with deployed(redis_server.url, model, tokenizer, options) as parts:
        parts.script.answer = ANSWER
        Losses(parts, "within the output")
        call = parts.stub.Generate(REQUEST)
        await eventually(lambda: parts.metric("baton_retries_total", role="decode") == 1)
        lost = parts.records.pop()
        await parts.registry.deregister(lost.worker_id, lost.incarnation)
        with pytest.raises(grpc.aio.AioRpcError, match=r"none came within 1 s \(queue_timeout_s\)") as caught:
            await events_of(call)
        assert from_call(caught.value).reason == "NO_WORKER"
        await parts.assert_idle()


@pytest.mark.parametrize("end", ["deadline", "cancel"])
async def test_a_wait_for_other_workers_has_an_end(
    deployment: Deployment, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.attempts._DOUBT_S", 1000.0)  # so that the one that was lost is not asked again
    await alone(deployment)
    Losses(deployment, "within the output")
    call = deployment.stub.Generate(REQUEST, timeout=2.0 if end == "deadline" else 20)
    await eventually(lambda: deployment.metric("baton_retries_total", role="decode") == 1)
    if end == "deadline":
        assert (await failure_of(call))[0] is CODES.DEADLINE_EXCEEDED
    else:
        call.cancel()
        await eventually(lambda: deployment.metric("baton_requests_total", outcome="cancelled") == 1)
    assert len(deployment.prefill.requests) == 1


async def test_what_no_worker_could_hold_any_more_is_not_tried(deployment: Deployment) -> None:
    await alone(deployment)
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5] * 31), stop=common_pb2.StopConditions(max_tokens=6)
    )
    deployment.records[0] = dataclasses.replace(deployment.records[0], num_blocks=2, incarnation="small")
    await deployment.announce()
    await eventually(lambda: any(view.record.num_blocks == 2 for view in deployment.queue.views))
    Losses(deployment, "within the output")
    assert await failure_of(deployment.stub.Generate(request)) == (CODES.UNAVAILABLE, "WORKER_LOST")
    assert len(deployment.prefill.requests) == 1


def entry(value: float) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(logprob=value)


async def test_log_probabilities_of_the_prompt_come_once(deployment: Deployment) -> None:
    """The second worker scores in other parts than the first one did."""
    parts = iter([[(1, 2)], [(1, 1), (2, 3)]])

    async def prefill(request: Any, context: Any) -> AsyncIterator[Any]:
        for first, last in (mine := next(parts)):
            scored = [entry(-float(position)) for position in range(first, last + 1)]
            yield prefill_pb2.PrefillResponse(
                prompt_logprobs=prefill_pb2.PromptLogprobs(first_position=first, logprobs=scored)
            )
        if len(mine) == 1:
            raise UnavailableError("the engine died", reason="ENGINE_DIED")
        yield deployment.prefill.first_token(
            request, finish_reason=common_pb2.FINISH_REASON_LENGTH, logprobs=entry(-0.5)
        )
        yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())

    deployment.script.prefill = prefill
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5, 6, 7, 8]),
        stop=common_pb2.StopConditions(max_tokens=1),
        logprobs=common_pb2.LogprobOptions(output_top=0, prompt_top=0),
    )
    events = await events_of(deployment.stub.Generate(request))
    scored = [event.scored_prompt for event in events if event.HasField("scored_prompt")]
    assert [(each.first_position, list(each.token_ids)) for each in scored] == [(1, [6, 7]), (3, [8])]
    assert [each.logprob for part in scored for each in part.logprobs] == [-1.0, -2.0, -3.0]


async def test_a_scored_prompt_is_not_scored_again(deployment: Deployment) -> None:
    async def prefill(request: Any, context: Any) -> AsyncIterator[Any]:
        asked.append(request.logprobs)
        if request.logprobs.HasField("prompt_top"):
            yield prefill_pb2.PrefillResponse(
                prompt_logprobs=prefill_pb2.PromptLogprobs(first_position=1, logprobs=[entry(-1.0), entry(-2.0)])
            )
        kv = deployment.prefill.descriptor(request)
        yield deployment.prefill.first_token(request, kv=kv, logprobs=entry(-0.5))
        await deployment.prefill.released[kv.lease_id].wait()
        yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        if len(asked) == 1:
            raise UnavailableError("the engine died", reason="ENGINE_DIED")
        yield handover()
        deployment.decode.release(request)
        yield decode_pb2.DecodeResponse(
            tokens=decode_pb2.DecodedTokens(
                first_position=request.kv.num_tokens + 1, ids=[102], logprobs=[entry(-0.25)]
            )
        )
        yield finished()

    asked: list[common_pb2.LogprobOptions] = []
    deployment.script.prefill, deployment.script.decode = prefill, decode
    options = common_pb2.LogprobOptions(output_top=0, prompt_top=0)
    answer = await deployment.stub.Complete(
        gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=IDS), stop=common_pb2.StopConditions(max_tokens=3), logprobs=options
        )
    )
    assert asked == [options, common_pb2.LogprobOptions(output_top=0)]
    assert list(answer.token_ids) == [100, 101, 102]
    assert [each.logprob for each in answer.logprobs] == [-0.5, -0.5, -0.25]
    assert list(answer.scored_prompt.token_ids) == IDS[1:]


async def test_a_loss_is_seen_in_the_trace_and_the_log(
    redis_server: EmbeddedRedis, model: ServedModel, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    options = Options(max_retries=1, tracer=provider.get_tracer("test"))
    async with deployed(redis_server.url, model, tokenizer, options) as parts:
        parts.script.answer = ANSWER
        parts.records.append(dataclasses.replace(parts.records[1], worker_id="d2", incarnation="second"))
        await parts.announce()
        Losses(parts, "within the output")
        await parts.stub.Complete(REQUEST)
        await parts.assert_idle()
    [root] = [span for span in exporter.get_finished_spans() if span.name == "baton.v1.GatewayService/Complete"]
    [event] = root.events
    assert event.name == "baton.worker_lost"
    assert event.attributes["baton.reason"] == "ENGINE_DIED"
    assert root.attributes["baton.num_retries"] == 1
    [line] = [each for each in caplog.records if "a worker was lost" in each.message]
    assert (line.worker_id, line.reason, line.num_output_tokens) == (
        event.attributes["baton.worker_id"],
        "ENGINE_DIED",
        3,
    )
