"""A worker's life from ready to gone: heartbeats, health that follows progress, and the end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol

from baton.core.errors import AlreadyExistsError, FailedPreconditionError, ServingError, StartupError, UnavailableError
from baton.core.workers import WorkerState
from baton.engine.process import EngineDiedError

if TYPE_CHECKING:
    from baton.core.workers import WorkerRecord
    from baton.rpc.server import ServingServer
    from baton.worker.description import WorkerDescription
    from baton.worker.engine_client import EngineClient
    from baton.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

# What handlers get to write their last status once nothing runs any more.
_LAST_WORDS_S = 1.0
_DEREGISTER_S = 2.0
# How long the life before this one may still be listed when nobody deregistered it, and a bit.
_ID_WAIT_S = 4.0


class Registry(Protocol):
    """Where workers announce themselves."""

    async def heartbeat(self, record: WorkerRecord) -> None:
        """Keeps the worker listed. UnavailableError: go on. AlreadyExistsError: another worker is alive under its id.

        FailedPreconditionError: its id is somebody else's for good.
        """
        ...

    async def deregister(self, worker_id: str, incarnation: str) -> None:
        """Takes the worker out at once."""
        ...


class WorkerLife:
    """Announces a worker whose server has started and whose engine is warm, until it is told to stop.

    `state` and `require_ready` are for its servicers.
    """

    def __init__(
        self, server: ServingServer, engine: EngineClient[Any], registry: Registry, settings: WorkerSettings
    ) -> None:
        self._server = server
        self._engine = engine
        self._registry = registry
        self._settings = settings
        self._is_draining = False
        self._is_serving = False
        self._is_registry_away = False

    @property
    def state(self) -> WorkerState:
        """DRAINING also while the engine is stuck: what it runs may end, and nothing new is to come."""
        return WorkerState.DRAINING if self._is_draining or self._is_stuck else WorkerState.READY

    def require_ready(self) -> None:
        """Raises UnavailableError while draining; the caller may try another worker."""
        if self._is_draining:
            raise UnavailableError("the worker is shutting down", reason="DRAINING")

    async def run(self, description: WorkerDescription, stop: asyncio.Event) -> None:
        """Serves until `stop` is set and what runs has ended, or the grace is over.

        Raises EngineDiedError, after every open call was told, when the engine is no more, and StartupError when
        another process has the worker's id.
        """
        death: EngineDiedError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._engine.run())
                beating = tasks.create_task(self._beat(description))
                await stop.wait()
                self._is_draining = True
                # A heartbeat after the deregistration would be refused as somebody else's.
                beating.cancel()
                await asyncio.wait((beating,))
                await self._drain(description)
                reading.cancel()
        except* EngineDiedError as group:
            death = _first(group)
        finally:
            await asyncio.shield(self._server.drain(_LAST_WORDS_S))
        if death is not None:
            raise death

    @property
    def _is_stuck(self) -> bool:
        return self._engine.busy_without_progress_s > self._settings.stall_s

    async def _beat(self, description: WorkerDescription) -> None:
        # The condition, because a cancellation that meets a Redis call can get lost in its client.
        taken_since_s: float | None = None
        while not self._is_draining:
            try:
                await self._registry.heartbeat(description.record(self.state, self._engine.stats))
            except UnavailableError as error:
                self._note_registry(away=True, reason=str(error))
            except FailedPreconditionError as error:
                raise StartupError(f"worker_id: {error}") from error
            except AlreadyExistsError as error:
                # It may be this worker's own life before, killed a moment ago.
                now_s = asyncio.get_running_loop().time()
                taken_since_s = now_s if taken_since_s is None else taken_since_s
                if now_s - taken_since_s > _ID_WAIT_S:
                    raise StartupError(f"worker_id: {error}; give this one another id") from error
            else:
                taken_since_s = None
                self._note_registry(away=False)
            if not self._is_draining:
                self._show_health(serving=not self._is_stuck and taken_since_s is None)
            await asyncio.sleep(self._settings.heartbeat_s)

    async def _drain(self, description: WorkerDescription) -> None:
        """Takes nothing new and waits for what runs. The server stays up: peers still release leases through it."""
        self._show_health(serving=False)
        try:
            async with asyncio.timeout(_DEREGISTER_S):
                await self._registry.deregister(description.worker_id, description.incarnation)
        except (ServingError, TimeoutError) as error:
            _log.warning("not deregistered, the missing heartbeats will do: %s", error)
        try:
            async with asyncio.timeout(self._settings.server.drain_grace_s):
                await self._engine.wait_all_over()
        except TimeoutError:
            _log.warning("%d requests are cut off by the end of the grace", self._engine.num_attempts)

    def _show_health(self, *, serving: bool) -> None:
        if serving != self._is_serving:
            self._is_serving = serving
            self._server.set_serving(serving)
            _log.info("serving" if serving else "not serving")

    def _note_registry(self, *, away: bool, reason: str = "") -> None:
        if away != self._is_registry_away:
            self._is_registry_away = away
            _log.warning("the registry is away: %s", reason) if away else _log.info("the registry is back")


def _first(group: BaseExceptionGroup[EngineDiedError]) -> EngineDiedError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
