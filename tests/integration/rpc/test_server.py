from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from opentelemetry.trace import NoOpTracerProvider

from baton.core.errors import StartupError, UnavailableError
from baton.core.settings import ServerSettings
from baton.rpc.errors import from_call
from baton.rpc.server import ServingServer
from baton.v1 import gateway_pb2, gateway_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
OURS = "baton.v1.GatewayService"
TRACER = NoOpTracerProvider().get_tracer("off")


def health_of(running) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(running.pool.get(running.server.address))


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", OURS])
async def test_health_follows_what_is_set(running, service: str) -> None:
    health = health_of(running)
    assert (await health.Check(asked(service))).status == SERVING
    running.server.set_serving(False)
    assert (await health.Check(asked(service))).status == NOT_SERVING


async def test_health_of_a_service_that_is_not_there(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_of(running).Check(asked("nope"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health_of(running).Watch(asked("nope"))
    assert (await anext(aiter(watch))).status == SERVICE_UNKNOWN
    watch.cancel()


async def test_health_lists_all_services(running) -> None:
    statuses = (await health_of(running).List(health_pb2.HealthListRequest())).statuses
    assert {name: one.status for name, one in statuses.items()} == {"": SERVING, OURS: SERVING}


async def test_a_new_server_is_not_serving_until_told() -> None:
    server = ServingServer(ServerSettings(), TRACER)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(asked(""))).status == NOT_SERVING
    await server.drain(0)


@pytest.mark.parametrize("service", ["", OURS])
async def test_a_watch_sees_changes_and_ends_with_the_server(running, service: str) -> None:
    async with asyncio.timeout(20):
        watch = health_of(running).Watch(asked(service))
        statuses = aiter(watch)
        assert (await anext(statuses)).status == SERVING
        running.server.set_serving(False)
        assert (await anext(statuses)).status == NOT_SERVING
        running.server.set_serving(True)
        assert (await anext(statuses)).status == SERVING
        draining = asyncio.ensure_future(running.server.drain(60))  # an open watch must not stretch it
        assert (await anext(statuses)).status == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(statuses)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await draining


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_gives_the_schema_under_both_names(running, version: str) -> None:
    method = running.pool.get(running.server.address).stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    asked_for = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=OURS),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such"),
    ]
    listed, found, missing = [answer async for answer in method(iter(asked_for))]
    assert {service.name for service in listed.list_services_response.service} == {
        OURS,
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in found.file_descriptor_response.file_descriptor_proto
    ]
    assert {file.name for file in files} == {"baton/v1/gateway.proto", "baton/v1/common.proto"}
    assert missing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_a_taken_port_is_named_and_nothing_else_is_hurt(running) -> None:
    second = ServingServer(ServerSettings(port=running.server.port), TRACER)
    with pytest.raises(StartupError, match=rf"127\.0\.0\.1:{running.server.port}: Address already in use"):
        await second.start()
    await second.drain()
    await running.stub.GetModel(gateway_pb2.GetModelRequest())


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a..b"])
async def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=f"cannot listen on {host}:0: "):
        await ServingServer(ServerSettings(host=host), TRACER).start()


async def test_peers_are_told_an_address_that_reaches(running) -> None:
    assert running.server.address == f"127.0.0.1:{running.server.port}"
    server = ServingServer(ServerSettings(host="0.0.0.0"), TRACER)
    await server.start()
    assert server.address == f"{socket.gethostname()}:{server.port}"
    await server.drain(0)
    assert ServingServer(ServerSettings(advertise_host="w1"), TRACER).address == "w1:0"


async def _get(running) -> gateway_pb2.GetModelResponse:
    return await running.stub.GetModel(gateway_pb2.GetModelRequest(name="m"))


async def test_drain_lets_running_calls_end_and_refuses_new_ones(running) -> None:
    go = asyncio.Event()

    async def behave(context) -> None:
        await go.wait()

    running.servicer.behave = behave
    call = asyncio.ensure_future(_get(running))
    await running.servicer.entered.wait()
    draining = asyncio.ensure_future(running.server.drain(60))
    async with asyncio.timeout(20):
        while (await health_of(running).Check(asked(""))).status == SERVING:
            pass
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.GetModel(gateway_pb2.GetModelRequest())
        error = from_call(caught.value)
        assert isinstance(error, UnavailableError)
        assert error.reason == "DRAINING"
        assert not draining.done()
        go.set()
        assert (await call).model.name == "m"
        await draining


async def test_calls_that_outlive_the_grace_end_as_unavailable(running) -> None:
    async def behave(context) -> None:
        await asyncio.Event().wait()

    running.servicer.behave = behave
    call = running.stub.Generate(gateway_pb2.GenerateRequest())
    responses = aiter(call)
    await anext(responses)
    async with asyncio.timeout(20):
        draining = asyncio.ensure_future(running.server.drain(0.05))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(responses)
        assert from_call(caught.value).reason == "DRAINING"
        await running.servicer.left.wait()
        await draining


async def test_drain_twice_and_before_start() -> None:
    server = ServingServer(ServerSettings(), TRACER)
    await server.drain()
    server = ServingServer(ServerSettings(), TRACER)
    await server.start()
    await asyncio.gather(server.drain(0), server.drain(0))
    await server.drain(0)


async def test_channels_are_reused_until_forgotten(running) -> None:
    address = running.server.address
    first = running.pool.get(address)
    assert running.pool.get(address) is first
    await running.pool.forget(address)
    await running.pool.forget(address)
    assert running.pool.get(address) is not first
    running.__post_init__()
    await running.stub.GetModel(gateway_pb2.GetModelRequest())


async def test_a_restarted_peer_is_found_again_on_the_same_channel(running) -> None:
    port = running.server.port
    await running.stub.GetModel(gateway_pb2.GetModelRequest())
    await running.server.drain(0)
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.GetModel(gateway_pb2.GetModelRequest())
    again = ServingServer(ServerSettings(port=port), TRACER)
    again.add(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        running.servicer,
        gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
    )
    await again.start()
    await running.stub.GetModel(gateway_pb2.GetModelRequest(), wait_for_ready=True, timeout=20)
    await again.drain(0)
