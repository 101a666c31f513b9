from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from baton.core.errors import InvalidArgumentError, UnavailableError
from baton.core.settings import ServerSettings
from baton.rpc.channels import ChannelPool
from baton.rpc.server import ServingServer
from baton.v1 import gateway_pb2, gateway_pb2_grpc, kv_transfer_pb2, kv_transfer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
TRACEPARENT = f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"


async def wait_forever(context) -> None:
    await asyncio.Event().wait()


def raising(error: BaseException):
    async def behave(context) -> None:
        raise error

    return behave


async def aborting(context) -> None:
    await context.abort(grpc.StatusCode.DATA_LOSS, "gone")


async def call_and_end(running, kind: str, how: str) -> None:
    """One call, ended by its server, its deadline, its canceller or its caller's task."""
    timeout = 1.0 if how == "deadline" else 30
    if kind == "unary":
        call = running.stub.GetModel(gateway_pb2.GetModelRequest(), timeout=timeout)

        async def use() -> None:
            await call
    else:
        call = running.stub.Generate(gateway_pb2.GenerateRequest(), timeout=timeout)

        async def use() -> None:
            async for _ in call:
                pass

    async with asyncio.timeout(40):
        user = asyncio.ensure_future(use())
        if how in ("cancel", "task"):
            await running.servicer.entered.wait()
            (call if how == "cancel" else user).cancel()
        await asyncio.wait({user})
        if not user.cancelled():
            user.exception()


@asynccontextmanager
async def deaf_once_entered(running) -> AsyncIterator[str]:
    """An address of the server where it hears nothing of its callers once a handler runs.

    At a deadline the client cancels its call. Whether a server hears of that or has its own deadline first is open.
    """

    async def accepted(from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", running.server.port)

        async def answer() -> None:
            while data := await from_server.read(65_536):
                to_client.write(data)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(answer())
            while data := await from_client.read(65_536):
                if not running.servicer.entered.is_set():
                    to_server.write(data)
            to_server.close()
        to_client.close()

    listener = await asyncio.start_server(accepted, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield address
    finally:
        await running.pool.forget(address)
        listener.close()


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize(
    ("how", "behave", "code", "server_fault"),
    [
        ("server", None, "OK", False),
        ("server", raising(InvalidArgumentError("x", "bad")), "INVALID_ARGUMENT", False),
        ("server", raising(UnavailableError("away")), "UNAVAILABLE", True),
        ("server", raising(ValueError("bug")), "INTERNAL", True),
        ("server", aborting, "DATA_LOSS", True),
        ("cancel", wait_forever, "CANCELLED", False),
        ("task", wait_forever, "CANCELLED", False),
        ("deadline", wait_forever, "DEADLINE_EXCEEDED", True),
    ],
    ids=["ok", "invalid", "unavailable", "bug", "abort", "cancel", "task", "deadline"],
)
async def test_both_spans_tell_how_the_call_ended(running, kind, how, behave, code, server_fault) -> None:
    if behave:
        running.servicer.behave = behave
    if how == "deadline":
        async with deaf_once_entered(running) as address:
            running.stub = gateway_pb2_grpc.GatewayServiceStub(running.pool.get(address))
            await running.pool.get(address).channel_ready()
            await call_and_end(running, kind, how)
            await running.spans.both()
    else:
        await call_and_end(running, kind, how)
    client, server = await running.spans.both()
    name = f"baton.v1.GatewayService/{'GetModel' if kind == 'unary' else 'Generate'}"
    for span in (client, server):
        assert span.name == name
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.response.status_code"] == code
    assert (client.status.status_code is StatusCode.ERROR) is (code != "OK")
    assert (server.status.status_code is StatusCode.ERROR) is server_fault
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id
    assert not client.status.description
    assert not server.status.description


async def test_a_callers_trace_goes_on_and_is_current_in_the_handler(running) -> None:
    seen = []

    async def behave(context) -> None:
        seen.append(trace.get_current_span().get_span_context())

    running.servicer.behave = behave
    async with grpc.aio.insecure_channel(running.server.address) as channel:
        await gateway_pb2_grpc.GatewayServiceStub(channel).GetModel(
            gateway_pb2.GetModelRequest(), metadata=(("traceparent", TRACEPARENT), ("tracestate", "v=1"))
        )
    (span,) = running.spans.get_finished_spans()
    assert span.context.trace_id == TRACE_ID
    assert span.parent.span_id == 0xB7AD6B7169203331
    assert span.context.trace_state.get("v") == "1"
    assert seen[0].span_id == span.context.span_id


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-0"])
async def test_a_broken_traceparent_starts_a_new_trace(running, traceparent: str) -> None:
    async with grpc.aio.insecure_channel(running.server.address) as channel:
        await gateway_pb2_grpc.GatewayServiceStub(channel).GetModel(
            gateway_pb2.GetModelRequest(), metadata=(("traceparent", traceparent),)
        )
    (span,) = running.spans.get_finished_spans()
    assert span.parent is None


async def test_the_callers_own_metadata_arrives(running) -> None:
    seen = []

    async def behave(context) -> None:
        seen.append(dict(context.invocation_metadata()))

    running.servicer.behave = behave
    await running.stub.GetModel(gateway_pb2.GetModelRequest(), metadata=(("x-own", "1"),))
    assert seen[0]["x-own"] == "1"
    assert "traceparent" in seen[0]


async def test_without_an_exporter_the_trace_is_handed_on(running) -> None:
    pool = ChannelPool(max_message_bytes=4 * 1024 * 1024, tracer=NoOpTracerProvider().get_tracer("off"))
    parent = trace.SpanContext(TRACE_ID, 0xB7AD6B7169203331, is_remote=True, trace_flags=trace.TraceFlags(1))
    stub = gateway_pb2_grpc.GatewayServiceStub(pool.get(running.server.address))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        await stub.GetModel(gateway_pb2.GetModelRequest())
    await pool.close()
    (span,) = running.spans.get_finished_spans()
    assert span.context.trace_id == TRACE_ID


async def test_malformed_requests_have_a_span(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await running.pool.get(running.server.address).unary_unary("/baton.v1.GatewayService/GetModel")(b"\x0a\x01\xff")
    _, server = await running.spans.both()
    assert server.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"


class Source(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    async def RenewLease(self, request, context):
        return kv_transfer_pb2.RenewLeaseResponse(lease_s=1)

    async def PullBlocks(self, request, context):
        yield kv_transfer_pb2.PullBlocksResponse(data=b"x")


@pytest.fixture
async def source(running) -> AsyncIterator[kv_transfer_pb2_grpc.KvTransferServiceStub]:
    server = ServingServer(ServerSettings(), running.tracer)
    service = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"]
    server.add(kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server, Source(), service)
    await server.start()
    yield kv_transfer_pb2_grpc.KvTransferServiceStub(running.pool.get(server.address))
    await server.drain(0)


async def ask(source) -> None:
    await source.RenewLease(kv_transfer_pb2.RenewLeaseRequest())
    async for _ in source.PullBlocks(kv_transfer_pb2.PullBlocksRequest()):
        pass


async def test_calls_between_workers_are_parts_of_a_trace_or_of_none(running, source) -> None:
    await ask(source)
    assert running.spans.get_finished_spans() == ()
    with running.tracer.start_as_current_span("request") as request:
        await ask(source)
    async with asyncio.timeout(20):
        while len(running.spans.get_finished_spans()) < 5:
            await asyncio.sleep(0.01)
    assert {span.context.trace_id for span in running.spans.get_finished_spans()} == {request.context.trace_id}
