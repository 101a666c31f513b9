"""Whether a child answers: an endless watch of its readiness, for one life of the child."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

RETRY_S = 0.2
REDIS_INTERVAL_S = 1.0
REDIS_TIMEOUT_S = 2.0
# A child that starts refuses connections for seconds; gRPC's own back-off would then wait longer than it takes.
CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))


async def watch_grpc(address: str) -> AsyncGenerator[bool, None]:
    """Follows the health service at `address` (`host:port`): True while the server as a whole is SERVING."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                # The stubs' types leave Watch out.
                answers = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)  # type: ignore[attr-defined]
                async for answer in answers:
                    yield answer.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.aio.AioRpcError:
                pass
            yield False
            await asyncio.sleep(RETRY_S)


async def watch_redis(address: str) -> AsyncGenerator[bool, None]:
    """Pings the Redis at `address` (the path of a Unix socket): True while it answers in time."""
    while True:
        ready = await _answers_ping(address)
        yield ready
        await asyncio.sleep(REDIS_INTERVAL_S if ready else RETRY_S)


async def _answers_ping(path: str) -> bool:
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                return await reader.readline() == b"+PONG\r\n"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
