"""A stand-in for a component: a gRPC health server that misbehaves as told. Run as a script."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio


async def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--refuse", help="say this and end with code 1, without ever being ready")
    parser.add_argument("--live", type=float, help="crash after so many seconds")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--helper", action="store_true", help="start a process that outlives this one")
    options = parser.parse_args()
    print("hello from", os.getpid(), flush=True)
    if options.refuse:
        print(options.refuse, file=sys.stderr)
        return 1
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if options.stubborn else stop.set)
    if options.helper:
        helper = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "import time; time.sleep(1000)")
        print("helper", helper.pid, flush=True)
    server = grpc.aio.server()
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(f"127.0.0.1:{options.port}")
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        async with asyncio.timeout(options.live):
            await stop.wait()
    except TimeoutError:
        os.abort()
    await server.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
