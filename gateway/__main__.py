from __future__ import annotations

from baton.core.interrupts import end_quietly_until_handled

if __name__ == "__main__":  # the imports below take a second and more
    end_quietly_until_handled()

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from baton.coordination.client import connect
from baton.coordination.keys import Keys
from baton.coordination.limits import QueueConfig
from baton.coordination.queue import AdmissionQueue
from baton.core.clock import SystemClock
from baton.core.ids import new_incarnation
from baton.core.start_up import StartPhases
from baton.rpc.channels import ChannelPool
from baton.rpc.lifecycle import run_component
from baton.rpc.server import ServingServer
from baton.telemetry.instruments import GatewayInstruments, new_registry
from baton.telemetry.logging import setup_logging
from baton.telemetry.metrics import start_metrics
from baton.telemetry.tracing import setup_tracing
from baton.v1 import gateway_pb2, gateway_pb2_grpc
from gateway.attempts import Deployment
from gateway.fleet import Fleet
from gateway.prefixes import KnownPrefixes
from gateway.routing import Router
from gateway.served_model import load_served_model
from gateway.service import GatewayServicer, RequestSettings
from gateway.session import SessionServices
from gateway.settings import GatewaySettings
from gateway.tokenization import Tokenizer, TokenizerPool
from gateway.worker_calls import LOOKAHEAD_BYTES, WorkerCalls

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from gateway.served_model import ServedModel

_log = logging.getLogger("gateway")

_FLEET_INTERVAL_S = 0.5


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Runs a gateway until `stop` is set, then drains it. StartupError when it cannot start."""
    setup_logging(settings.telemetry, "gateway")
    phases = StartPhases()
    phases.begin("load the tokenizer")
    tokenizer, model = await asyncio.to_thread(_load_model, settings)
    phases.end()
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        tracing = setup_tracing(settings.telemetry, "gateway", incarnation)
        stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
        registry = new_registry()
        instruments = GatewayInstruments(registry)
        if metrics := start_metrics(settings.telemetry, registry, settings.server.host):
            stack.push_async_callback(asyncio.to_thread, metrics.close)
        keys = Keys(settings.redis.namespace, model.name)
        connection = await connect(settings.redis, keys)
        stack.push_async_callback(connection.close)
        channels = ChannelPool(
            max_message_bytes=settings.server.max_message_bytes,
            tracer=tracing.tracer,
            lookahead_bytes=LOOKAHEAD_BYTES,
        )
        stack.push_async_callback(channels.close)
        pool = TokenizerPool(
            tokenizer, num_threads=settings.limits.tokenizer_threads, max_pending=settings.limits.max_pending_texts
        )
        stack.callback(pool.close)
        router = Router(model.fingerprint, reserved_output_share=settings.limits.reserved_output_share)
        classes = settings.queue.queue_classes
        config = QueueConfig(
            gateway_id=incarnation, classes=classes.limits, reserve_after_s=settings.queue.reserve_after_s
        )
        queue = AdmissionQueue(connection, keys, router.choose_route, config)
        services = SessionServices(
            model=model,
            tokenizer=pool,
            deployment=Deployment(
                queue=queue,
                router=router,
                workers=WorkerCalls(channels),
                prefixes=KnownPrefixes(shares=settings.shares_prefixes),
                max_retries=settings.limits.max_retries,
            ),
            tracer=tracing.tracer,
            classes=classes,
        )
        requests = RequestSettings(
            clock=SystemClock(),
            instruments=instruments,
            request_timeout_s=settings.limits.request_timeout_s,
            max_choices=settings.limits.max_choices,
        )
        server = ServingServer(settings.server, tracing.tracer)
        server.add(
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
            GatewayServicer(services, requests),
            gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
        )
        stack.push_async_callback(server.drain)
        # Before anything runs: a port that is taken is the end.
        await server.start()
        _log.info("listening", extra={"address": server.address, "model": model.name})
        fleet = Fleet(queue, router, channels, server)
        following = fleet.follow(interval_s=_FLEET_INTERVAL_S, call_grace_s=settings.limits.request_timeout_s)
        await _run(server, stop, queue.run(), following)


async def _run(server: ServingServer, stop: asyncio.Event, *background: Coroutine[Any, Any, None]) -> None:
    """Runs what is beside the server until `stop` is set and the server is drained."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in background]
        try:
            await stop.wait()
        finally:
            # Running requests end before what they hold on to: the queue's tasks give their credit back.
            await server.drain()
            for task in running:
                task.cancel()


def _load_model(settings: GatewaySettings) -> tuple[Tokenizer, ServedModel]:
    tokenizer = Tokenizer.load(settings.model.path)
    model = load_served_model(settings.model, tokenizer, default_max_tokens=settings.limits.default_max_tokens)
    return tokenizer, model


if __name__ == "__main__":
    sys.exit(run_component(GatewaySettings, serve, sys.argv[1:]))
