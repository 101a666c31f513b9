"""Channels ping a connection that carries nothing, and servers take it: seen on the wire between the two."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.rpc.channels import client_options
from baton.rpc.server import server_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    Options = list[tuple[str, int]]

MAX_MESSAGE_BYTES = 1024
FASTER = 100
# RFC 9113: the preface, the head of a frame, its types and the flag of a ping's answer.
PREFACE_BYTES, HEAD_BYTES = 24, 9
PING, GOAWAY = 6, 7
ACK = 1
# A server of gRPC's forgives the first ping, two that come too early, and one that a client measures with.
NUM_PINGS = 6
METHOD = "/test/Silent"


def faster(options: Options) -> Options:
    """The same with its times between pings shortened, and so their relation kept."""
    is_interval = ("keepalive_time_ms", "interval_without_data_ms")
    return [(name, value // FASTER if name.endswith(is_interval) else value) for name, value in options]


class Wire:
    """Carries the bytes of one connection and counts the frames that matter."""

    def __init__(self) -> None:
        self.num_goaways = 0
        self._num_pings = 0
        self._changed = asyncio.Event()

    async def pinged(self, times: int) -> None:
        """Returns when the client has sent so many more pings, or the server has had enough of them."""
        wanted = self._num_pings + times
        while self._num_pings < wanted and not self.num_goaways:
            self._changed.clear()
            await self._changed.wait()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool) -> None:
        try:
            if from_client:
                writer.write(await reader.readexactly(PREFACE_BYTES))
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                writer.write(head + await reader.readexactly(int.from_bytes(head[:3])))
                kind, flags = head[3], head[4]
                self._num_pings += from_client and kind == PING and not flags & ACK
                self.num_goaways += not from_client and kind == GOAWAY
                self._changed.set()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def wired(port: int) -> AsyncIterator[tuple[Wire, str]]:
    """A way to the server at `port`, and its address."""
    wire = Wire()
    carriers: list[asyncio.Task[None]] = []

    async def accepted(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        for reader, writer, from_client in (
            (client_reader, server_writer, True),
            (server_reader, client_writer, False),
        ):
            carriers.append(asyncio.create_task(wire.carry(reader, writer, from_client=from_client)))

    listener = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield wire, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)
        await asyncio.sleep(0)  # for what was closed


@asynccontextmanager
async def silent_server(options: Options) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Its port, and what lets it answer."""
    speak = asyncio.Event()

    async def silent(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await speak.wait()
        return b"at last"

    handler = grpc.unary_unary_rpc_method_handler(silent)
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"Silent": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, speak
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(options: Options) -> AsyncIterator[tuple[Wire, asyncio.Event, grpc.aio.Channel]]:
    """One of our channels to a server with `options`, what lets that answer, and the wire between them."""
    async with (
        asyncio.timeout(60),
        silent_server(faster(options)) as (port, speak),
        wired(port) as (wire, address),
        grpc.aio.insecure_channel(address, options=faster(client_options(MAX_MESSAGE_BYTES))) as channel,
    ):
        yield wire, speak, channel


async def test_pings_of_a_silent_call_and_of_an_idle_channel_are_taken() -> None:
    async def during_a_call() -> None:
        async with connected(server_options(MAX_MESSAGE_BYTES)) as (wire, speak, channel):
            call = channel.unary_unary(METHOD)(b"")
            await wire.pinged(NUM_PINGS)
            speak.set()
            assert await call == b"at last"
            assert wire.num_goaways == 0

    async def between_calls() -> None:
        async with connected(server_options(MAX_MESSAGE_BYTES)) as (wire, speak, channel):
            speak.set()
            assert await channel.unary_unary(METHOD)(b"") == b"at last"
            await wire.pinged(NUM_PINGS)
            assert await channel.unary_unary(METHOD)(b"") == b"at last"
            assert wire.num_goaways == 0

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(during_a_call())
        tasks.create_task(between_calls())


async def test_a_server_without_our_options_has_enough_of_them() -> None:
    """So the test above sees what it is there for."""
    async with connected([]) as (wire, _, channel):
        call = channel.unary_unary(METHOD)(b"")
        await wire.pinged(NUM_PINGS)
        assert wire.num_goaways >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
