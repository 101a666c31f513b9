"""Baton as `baton up` runs it: gateway, both workers and Redis, with the load generator on the same cores."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc

from baton.cli.readiness import watch_grpc
from baton.cli.topology import LOOPBACK, free_port
from baton.core.launch import bound_to_this_process
from baton.rpc.errors import from_call
from baton.v1 import gateway_pb2, gateway_pb2_grpc
from baton.v1.common_pb2 import SamplingParams, StopConditions, TokenIds
from benchmarks.load import RequestFailedError
from benchmarks.systems.system import CannotRunError, System, log_file

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from benchmarks.workload import Request

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0


class GatewayClient:
    """Requests over gRPC, as any client would send them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: gateway_pb2_grpc.GatewayServiceAsyncStub = gateway_pb2_grpc.GatewayServiceStub(channel)

    async def generate(self, request: Request) -> AsyncIterator[int]:
        """See `Client`."""
        call = self._stub.Generate(
            gateway_pb2.GenerateRequest(
                token_ids=TokenIds(ids=request.prompt),
                sampling=SamplingParams(temperature=0.0),
                stop=StopConditions(max_tokens=request.max_tokens, ignore_eos=True),
            )
        )
        try:
            async for event in call:
                if event.HasField("delta") and event.delta.token_ids:
                    yield len(event.delta.token_ids)
        except grpc.aio.AioRpcError as error:
            raise RequestFailedError(str(from_call(error))) from error
        finally:
            call.cancel()


@asynccontextmanager
async def running_baton(name: str, model: Path, settings: Mapping[str, str]) -> AsyncIterator[System]:
    """Starts `baton up` with `settings` in its environment; yields it when it is ready, and leaves nothing behind."""
    log = log_file(name)
    port = free_port(LOOPBACK)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            # However this process ends, also by a signal: a system left running would spoil every later figure.
            *bound_to_this_process(
                [sys.executable, "-m", "baton.cli", "up", "--model", str(model), "--port", str(port)], signal.SIGTERM
            ),
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
        )
    address = f"{LOOPBACK}:{port}"
    try:
        await _wait_ready(process, address, log)
        async with grpc.aio.insecure_channel(address) as channel:
            configuration = {"model": str(model), **settings}
            yield System(name=name, client=GatewayClient(channel), configuration=configuration)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()


async def _wait_ready(process: asyncio.subprocess.Process, address: str, log: Path) -> None:
    async def serving() -> None:
        async for is_serving in watch_grpc(address):
            if is_serving:
                return

    ready, ended = asyncio.ensure_future(serving()), asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait((ready, ended), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            how = f"ended with {process.returncode}" if ended.done() else f"not ready after {START_TIMEOUT_S:.0f} s"
            raise CannotRunError(f"baton up: {how}: see {log}")
    finally:
        ready.cancel()
        ended.cancel()
