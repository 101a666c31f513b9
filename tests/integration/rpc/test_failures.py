from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from baton.core.errors import (
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServingError,
    UnavailableError,
)
from baton.core.settings import ServerSettings
from baton.rpc.deadlines import remaining_s
from baton.rpc.errors import from_call
from baton.rpc.server import ServingServer
from baton.v1 import gateway_pb2, gateway_pb2_grpc

METHODS = "/baton.v1.GatewayService/"


def raising(error: BaseException):
    async def behave(context) -> None:
        raise error

    return behave


async def get(running, **kwargs) -> gateway_pb2.GetModelResponse:
    return await running.stub.GetModel(gateway_pb2.GetModelRequest(name="m"), **kwargs)


async def read(call) -> list:
    return [response async for response in call]


async def failure(awaitable) -> tuple[grpc.aio.AioRpcError, ServingError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value, from_call(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgumentError("stop.strings[3]", "is empty"),
        OutOfRangeError("stop.max_tokens", "is beyond 100", limit=100),
        ResourceExhaustedError("chat is full", reason="QUEUE_FULL", retry_after_s=0.75),
        UnavailableError("no worker", reason="NO_WORKER"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_reaches_the_caller_whole(running, error: ServingError) -> None:
    running.servicer.behave = raising(error)
    for call in (get(running), read(running.stub.Generate(gateway_pb2.GenerateRequest()))):
        _, received = await failure(call)
        assert type(received) is type(error)
        assert vars(received) == vars(error)


async def test_pushback_is_in_the_trailers(running) -> None:
    running.servicer.behave = raising(ResourceExhaustedError("full", retry_after_s=0.75))
    status, _ = await failure(get(running))
    assert status.trailing_metadata()["grpc-retry-pushback-ms"] == "750"


async def test_an_error_of_a_task_group_is_that_error(running) -> None:
    async def behave(context) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raising(UnavailableError("no worker"))(context))

    running.servicer.behave = behave
    _, error = await failure(get(running))
    assert type(error) is UnavailableError


async def test_a_bug_says_nothing_to_the_client_and_all_to_the_log(running, caplog: pytest.LogCaptureFixture) -> None:
    running.servicer.behave = raising(ValueError("/etc/secret"))
    status, error = await failure(get(running))
    assert status.code() is grpc.StatusCode.INTERNAL
    assert type(error) is InternalError
    assert "secret" not in str(status)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info[1].args == ("/etc/secret",)


async def test_a_bug_beside_an_error_is_a_bug(running) -> None:
    running.servicer.behave = raising(ExceptionGroup("two", [UnavailableError("no worker"), ValueError("x")]))
    status, _ = await failure(get(running))
    assert status.code() is grpc.StatusCode.INTERNAL


async def test_an_own_abort_passes_through(running) -> None:
    async def behave(context) -> None:
        await context.abort(grpc.StatusCode.ABORTED, "try again")

    running.servicer.behave = behave
    status, _ = await failure(get(running))
    assert (status.code(), status.details()) == (grpc.StatusCode.ABORTED, "try again")


async def test_a_cancelled_error_that_nobody_asked_for_does_not_leave_the_client_waiting(running) -> None:
    running.servicer.behave = raising(asyncio.CancelledError())
    for call in (get(running), read(running.stub.Generate(gateway_pb2.GenerateRequest()))):
        async with asyncio.timeout(20):
            status, _ = await failure(call)
        assert status.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("method", "data", "field"),
    [
        ("GetModel", b"\x0a\x02\xff\xfe", "name"),
        ("Generate", b"\x22\x04\x12\x02\xff\xfe", "messages[0].content"),
        ("Generate", b"\x3a\x05\x12\x03a\xffb", "stop.strings[0]"),
        ("Generate", b"\x0a\x7f", "request_id"),
    ],
)
async def test_malformed_bytes_are_the_clients_fault_and_named(running, method: str, data: bytes, field: str) -> None:
    channel = running.pool.get(running.server.address)
    if method == "GetModel":
        call = channel.unary_unary(METHODS + method)(data)
    else:
        call = read(channel.unary_stream(METHODS + method)(data))
    status, error = await failure(call)
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    assert not running.servicer.entered.is_set()


async def test_an_oversized_request_reads_well_and_the_server_lives_on(running) -> None:
    big = gateway_pb2.GenerateRequest(text="x" * (5 * 1024 * 1024))
    async with grpc.aio.insecure_channel(running.server.address) as channel:  # a client without a limit of its own
        call = channel.unary_stream(
            METHODS + "Generate", request_serializer=gateway_pb2.GenerateRequest.SerializeToString
        )
        for responses in (call(big), running.stub.Generate(big)):
            _, error = await failure(read(responses))
            assert isinstance(error, ResourceExhaustedError)
            assert error.reason == "MESSAGE_TOO_LARGE"
            assert error.metadata["limit"] == str(4 * 1024 * 1024)
    assert (await get(running)).model.name == "m"


async def test_an_unknown_method_is_unimplemented(running) -> None:
    status, error = await failure(running.pool.get(running.server.address).unary_unary(METHODS + "Nope")(b""))
    assert status.code() is grpc.StatusCode.UNIMPLEMENTED
    assert type(error) is InternalError


async def test_an_unreachable_peer_is_unavailable(running) -> None:
    address = running.server.address
    await running.server.drain(0)
    await running.pool.forget(address)
    running.__post_init__()
    _, error = await failure(get(running))
    assert isinstance(error, UnavailableError)
    assert error.reason == "PEER_UNREACHABLE"


@pytest.mark.parametrize("how", ["cancel", "deadline", "task"])
async def test_the_handler_is_cleaned_up_when_the_caller_is_gone(running, how: str) -> None:
    async def behave(context) -> None:
        await asyncio.Event().wait()

    running.servicer.behave = behave
    # A deadline counts from the connection: the server hears of the call before it is over.
    await running.pool.get(running.server.address).channel_ready()
    call = running.stub.Generate(gateway_pb2.GenerateRequest(), timeout=1.0 if how == "deadline" else 30)
    reader = asyncio.ensure_future(read(call))
    await running.servicer.entered.wait()
    if how == "cancel":
        call.cancel()
    elif how == "task":
        reader.cancel()
    await asyncio.wait({reader})
    async with asyncio.timeout(20):
        await running.servicer.left.wait()


async def test_a_generator_cancelled_while_it_writes_is_closed_at_once(running) -> None:
    closed = asyncio.Event()

    async def flood(request, context):
        try:
            while True:
                yield gateway_pb2.GenerateResponse(delta=gateway_pb2.Delta(text="x" * 1000))
        finally:
            closed.set()

    class Flood(gateway_pb2_grpc.GatewayServiceServicer):
        Generate = staticmethod(flood)

    server = ServingServer(ServerSettings(), running.tracer)
    server.add(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        Flood(),
        gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
    )
    await server.start()
    call = gateway_pb2_grpc.GatewayServiceStub(running.pool.get(server.address)).Generate(gateway_pb2.GenerateRequest())
    await anext(aiter(call))
    call.cancel()
    async with asyncio.timeout(20):
        await closed.wait()
    await server.drain(0)


async def test_the_next_hop_gets_less_time_than_the_caller_gave(running) -> None:
    seen: list[float | None] = []

    async def behave(context) -> None:
        seen.append(remaining_s(context, margin_s=1.0))

    running.servicer.behave = behave
    await get(running, timeout=10)
    await get(running)
    assert seen[0] is not None
    assert 7.0 < seen[0] <= 9.0
    assert seen[1] is None
