"""What the gateway shows to the outside: refusals of bad input, health, traces."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2
from tests.integration.gateway.harness import Deployment, Options, eventually

CODES = grpc.StatusCode
Request = gateway_pb2.GenerateRequest


async def refusal_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (Request(), CODES.INVALID_ARGUMENT, "text"),
        (Request(text=""), CODES.INVALID_ARGUMENT, "text"),
        (Request(text="x", token_ids=common_pb2.TokenIds(ids=[1])), CODES.INVALID_ARGUMENT, "token_ids"),
        (Request(token_ids=common_pb2.TokenIds(ids=[1, 2, 3, 49152])), CODES.OUT_OF_RANGE, "token_ids.ids[3]"),
        (Request(token_ids=common_pb2.TokenIds(ids=[1] * 8192)), CODES.OUT_OF_RANGE, "token_ids.ids"),
        (Request(text="a b " * 5000), CODES.OUT_OF_RANGE, "text"),
        (Request(text="x", stop=common_pb2.StopConditions(max_tokens=8192)), CODES.OUT_OF_RANGE, "stop.max_tokens"),
        (
            Request(text="x", sampling=common_pb2.SamplingParams(temperature=-1)),
            CODES.INVALID_ARGUMENT,
            "sampling.temperature",
        ),
    ],
)
async def test_bad_input_names_its_field(
    deployment: Deployment, request_: Request, code: grpc.StatusCode, field: str
) -> None:
    error = await refusal_of(deployment.stub.Complete(request_))
    assert error.code() is code
    assert from_call(error).field == field
    assert deployment.prefill.requests == []


async def test_an_unknown_model(deployment: Deployment) -> None:
    for call in (
        deployment.stub.Complete(Request(text="x", model="gpt")),
        deployment.stub.Tokenize(gateway_pb2.TokenizeRequest(text="x", model="gpt")),
        deployment.stub.Detokenize(gateway_pb2.DetokenizeRequest(model="gpt")),
        deployment.stub.GetModel(gateway_pb2.GetModelRequest(name="gpt")),
        deployment.stub.GetModel(gateway_pb2.GetModelRequest()),
        deployment.stub.GetStatus(gateway_pb2.GetStatusRequest(model="gpt")),
    ):
        error = await refusal_of(call)
        assert (error.code(), from_call(error).reason) == (CODES.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_bytes_that_are_no_text_and_a_message_of_100_mb(deployment: Deployment) -> None:
    raw = deployment.channel.unary_unary("/baton.v1.GatewayService/Complete")
    # Field 3 (`text`), length 2, bytes that no UTF-8 text has.
    error = await refusal_of(raw(b"\x1a\x02\xff\xfe"))
    assert error.code() is CODES.INVALID_ARGUMENT
    assert from_call(error).field == "text"
    error = await refusal_of(raw(b"\x1a" + b"\x80\xe1\xd7/" + b"a" * 100_000_000))
    assert error.code() is CODES.RESOURCE_EXHAUSTED
    await deployment.stub.Complete(Request(text="still here"))


async def test_health_follows_the_fleet(deployment: Deployment) -> None:
    stub = health_pb2_grpc.HealthStub(deployment.channel)

    async def status() -> int:
        request = health_pb2.HealthCheckRequest(service="baton.v1.GatewayService")
        return (await stub.Check(request)).status

    async def is_serving() -> bool:
        return await status() == health_pb2.HealthCheckResponse.SERVING

    async def is_not_serving() -> bool:
        return await status() == health_pb2.HealthCheckResponse.NOT_SERVING

    await eventually(is_serving)
    [_, decode] = deployment.records
    del deployment.records[1]
    await deployment.registry.deregister(decode.worker_id, decode.incarnation)
    await eventually(is_not_serving)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def options(spans: InMemorySpanExporter) -> Options:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Options(tracer=provider.get_tracer("test"))


async def test_one_trace_tells_a_request_s_way(deployment: Deployment, spans: InMemorySpanExporter) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = (("traceparent", f"00-{trace_id}-{parent_id}-01"),)
    request = Request(text="a secret prompt", request_id="traced")
    answer = await deployment.stub.Complete(request, metadata=metadata)
    await deployment.assert_idle()
    await eventually(lambda: len(spans.get_finished_spans()) >= 10)
    found = {span.name: span for span in spans.get_finished_spans()}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {trace_id}

    def parent_of(name: str) -> str:
        by_id = {span.context.span_id: span.name for span in spans.get_finished_spans()}
        parent = found[name].parent
        return by_id.get(parent.span_id, f"{parent.span_id:016x}")

    server = "baton.v1.GatewayService/Complete"
    assert parent_of(server) == parent_id
    for phase in ("tokenize", "queue", "prefill", "decode"):
        assert parent_of(f"gateway.{phase}") == server
    assert parent_of("gateway.handover") == "gateway.decode"
    assert trace_id in deployment.prefill.metadata[0]["traceparent"]
    assert trace_id in deployment.decode.metadata[0]["traceparent"]
    attributes = found[server].attributes
    assert attributes["baton.request_id"] == "traced"
    assert attributes["gen_ai.usage.input_tokens"] == answer.finished.usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == answer.finished.usage.completion_tokens
    # All went well, and no call ends as cancelled.
    assert {span.status.status_code for span in spans.get_finished_spans()} == {StatusCode.UNSET}
    assert not any("secret" in str(span.to_json()) for span in found.values())


async def test_a_failed_phase_is_marked(deployment: Deployment, spans: InMemorySpanExporter) -> None:
    async def decode(request: Any, context: Any) -> Any:
        return
        yield

    deployment.script.decode = decode
    await refusal_of(deployment.stub.Complete(Request(text="x")))
    await eventually(lambda: any(span.name.endswith("GatewayService/Complete") for span in spans.get_finished_spans()))
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found["gateway.decode"].status.status_code is StatusCode.ERROR
    assert found["gateway.decode"].attributes["error.type"] == "UnavailableError"
    assert found["gateway.prefill"].status.status_code is StatusCode.UNSET
