"""What both workers' server processes are made of, besides their services."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from baton.coordination.client import connect
from baton.coordination.keys import Keys
from baton.coordination.registry import WorkerRegistry
from baton.core.ids import new_incarnation
from baton.engine.process import EngineDiedError, EngineProcess
from baton.rpc.lifecycle import run_component
from baton.rpc.server import ServingServer
from baton.telemetry.instruments import WorkerInstruments, new_registry
from baton.telemetry.logging import setup_logging
from baton.telemetry.metrics import start_metrics
from baton.telemetry.tracing import setup_tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from opentelemetry.trace import Tracer

    from baton.engine.channel import ChildChannel
    from baton.worker.engine_loop import EventBatch
    from baton.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

SpecT = TypeVar("SpecT")
SettingsT = TypeVar("SettingsT", bound="WorkerSettings")
# A step on a small machine takes seconds at most.
_ENGINE_STOP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHost:
    """One life of a worker's server process: its connections, its server, its instruments."""

    name: str
    worker_id: str
    incarnation: str
    tracer: Tracer
    instruments: WorkerInstruments
    registry: WorkerRegistry
    server: ServingServer

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: WorkerSettings) -> AsyncIterator[WorkerHost]:
        """Sets everything up and, when the block is left, takes it down. StartupError when a part is not to be had."""
        name, incarnation = settings.class_name, new_incarnation()
        setup_logging(settings.telemetry, name)
        async with AsyncExitStack() as stack:
            keys = Keys(settings.redis.namespace, settings.model.name)
            redis = await connect(settings.redis, keys)
            stack.push_async_callback(redis.close)
            tracing = setup_tracing(settings.telemetry, name, incarnation)
            stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
            metrics = new_registry()
            endpoint = start_metrics(settings.telemetry, metrics, settings.server.host)
            if endpoint is not None:
                stack.push_async_callback(asyncio.to_thread, endpoint.close)
            yield cls(
                name=name,
                worker_id=settings.worker_id,
                incarnation=incarnation,
                tracer=tracing.tracer,
                instruments=WorkerInstruments(metrics),
                registry=WorkerRegistry(redis, keys),
                server=ServingServer(settings.server, tracing.tracer),
            )

    @asynccontextmanager
    async def engine(
        self, target: Callable[[ChildChannel[Any, EventBatch], SpecT], None], spec: SpecT, stop: asyncio.Event
    ) -> AsyncIterator[EngineProcess[Any, EventBatch] | None]:
        """The engine process, ready, for as long as the block; None when `stop` was set before it was."""
        process = await _unless(
            stop, EngineProcess.start(target, spec, name=f"{self.name} engine", words=(self.name, self.worker_id))
        )
        if process is None:
            yield None
            return
        try:
            yield process
        finally:
            await process.stop(_ENGINE_STOP_S)


def run_worker(
    settings_type: type[SettingsT], serve: Callable[[SettingsT, asyncio.Event], Awaitable[None]], argv: Sequence[str]
) -> int:
    """Runs a worker as `run_component` does; 1 as well when its engine died, so that a supervisor restarts it."""
    exit_code = 1
    try:
        exit_code = run_component(settings_type, serve, argv)
    except* EngineDiedError as group:
        _log.error("the worker ends: %s", _leaf(group))
    return exit_code


def _leaf(error: BaseException) -> BaseException:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _unless(stop: asyncio.Event, starting: Any) -> Any:
    """What `starting` returns, or None, and `starting` cancelled, when `stop` is set first."""
    async with asyncio.TaskGroup() as tasks:
        start, stopped = tasks.create_task(starting), tasks.create_task(stop.wait())
        await asyncio.wait((start, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not start.done():
            start.cancel()
    return None if start.cancelled() else start.result()
