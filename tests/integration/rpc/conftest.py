"""A real server with a servicer that does as it is told, and real channels to it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.core.settings import ServerSettings
from baton.rpc.channels import ChannelPool
from baton.rpc.server import ServingServer
from baton.v1 import gateway_pb2, gateway_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import grpc
    from opentelemetry.sdk.trace import ReadableSpan

SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]


class Servicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Runs `behave(context)` in GetModel, and in Generate after the first message."""

    def __init__(self) -> None:
        self.behave: Callable[[grpc.aio.ServicerContext], Awaitable[None]] = self._nothing
        self.entered = asyncio.Event()
        self.left = asyncio.Event()

    async def _nothing(self, context: grpc.aio.ServicerContext) -> None:
        pass

    async def GetModel(self, request, context):
        self.entered.set()
        try:
            await self.behave(context)
            return gateway_pb2.GetModelResponse(model=gateway_pb2.Model(name=request.name))
        finally:
            self.left.set()

    async def Generate(self, request, context):
        self.entered.set()
        try:
            yield gateway_pb2.GenerateResponse(accepted=gateway_pb2.Accepted(request_id=request.request_id))
            await self.behave(context)
            yield gateway_pb2.GenerateResponse(finished=gateway_pb2.Finished())
        finally:
            self.left.set()


class Spans(InMemorySpanExporter):
    """Finished spans, that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._arrived = asyncio.Event()

    def export(self, spans):
        self._arrived.set()
        return super().export(spans)

    async def both(self) -> tuple[ReadableSpan, ReadableSpan]:
        """The client's and the server's span of the only call."""
        async with asyncio.timeout(20):
            while len(self.get_finished_spans()) < 2:
                self._arrived.clear()
                await self._arrived.wait()
        spans = {span.kind.name: span for span in self.get_finished_spans()}
        return spans["CLIENT"], spans["SERVER"]


@dataclass
class Running:
    """What a test works with."""

    servicer: Servicer
    server: ServingServer
    spans: Spans
    tracer: object
    pool: ChannelPool
    stub: gateway_pb2_grpc.GatewayServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.pool.get(self.server.address))


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """A server that serves, and a client."""
    spans = Spans()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("test")
    server, servicer = ServingServer(ServerSettings(), tracer), Servicer()
    server.add(gateway_pb2_grpc.add_GatewayServiceServicer_to_server, servicer, SERVICE)
    await server.start()
    server.set_serving(True)
    pool = ChannelPool(max_message_bytes=4 * 1024 * 1024, tracer=tracer)
    try:
        yield Running(servicer, server, spans, tracer, pool)
    finally:
        await pool.close()
        await server.drain(0)
        provider.shutdown()
