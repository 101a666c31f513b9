"""`python -m gateway`: help, one-line failures at start, a served request, a clean end."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import gateway_pb2, gateway_pb2_grpc
from tests.fixtures.model import MODEL_FOLDER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.coordination.embedded import EmbeddedRedis


async def run_gateway(*flags: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def running_gateway(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its address, when it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            while not (
                found := re.search(rb"address\S*[=:]\s*\S*?(127\.0\.0\.1:\d+)", await process.stderr.readline())
            ):
                assert process.returncode is None
        yield process, found[1].decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def flags_for(redis: EmbeddedRedis, **more: str) -> list[str]:
    flags = {"model.path": str(MODEL_FOLDER), "redis.url": redis.url, "server.port": "0"} | more
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


def last_line(err: str) -> str:
    """The reason for the end; before it nothing but what the gateway was doing."""
    *phases, line = err.splitlines()
    assert all("start-up: " in phase for phase in phases), err
    return line


async def test_help_lists_every_setting_with_its_default() -> None:
    code, out, err = await run_gateway("--help")
    assert (code, err) == (0, "")
    for setting in (
        "model.path",
        "redis.url",
        "server.port",
        "queue.classes",
        "limits.request_timeout_s",
        "limits.default_max_tokens",
        "telemetry.metrics_port",
    ):
        assert f"--{setting} " in out
    assert "(default: 600.0)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model.path": "/nowhere"}, "/nowhere/tokenizer.json: no such file"),
        ({"redis.url": "redis://127.0.0.1:1/0"}, "redis.url: cannot use Redis at"),
        ({"limits.default_max_tokens": "0"}, "limits.default_max_tokens"),
    ],
)
async def test_a_failure_at_start_is_one_line(redis_server: EmbeddedRedis, more: dict[str, str], words: str) -> None:
    code, out, err = await run_gateway(*flags_for(redis_server, **more))
    assert code == 1
    assert out == ""
    assert words in last_line(err)


async def test_a_taken_port_is_one_line(redis_server: EmbeddedRedis) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = await run_gateway(*flags_for(redis_server, **{"server.port": str(port)}))
    assert code == 1
    line = last_line(err)
    assert "server.port" in line
    assert str(port) in line


async def test_it_answers_without_workers_and_ends_cleanly(redis_server: EmbeddedRedis) -> None:
    async with running_gateway(*flags_for(redis_server)) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            [model] = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
            assert model.name == MODEL_FOLDER.name
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Complete(gateway_pb2.GenerateRequest(text="x"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            _, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert b"Traceback" not in err
