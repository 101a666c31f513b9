"""grpc.health.v1 for every service of a server and for the server itself (the empty name)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import NotFoundError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.rpc.handlers import Context

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers what was last set. Not the library's servicer: that one's watches never end, and so each open watch
    would stretch a shutdown to its full grace.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": NOT_SERVING}
        self._changed = asyncio.Event()
        self._closed = False

    def add(self, service: str) -> None:
        """Makes a service known; it has the server's status."""
        self._statuses[service] = self._statuses[""]

    def set_serving(self, serving: bool) -> None:
        """Sets all services and wakes all watches. Without effect after `close`."""
        if not self._closed:
            self._update(SERVING if serving else NOT_SERVING)

    def close(self) -> None:
        """NOT_SERVING for good; watches see it and end."""
        self._closed = True
        self._update(NOT_SERVING)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The status now; NOT_FOUND for a service that this server does not have."""
        if request.service not in self._statuses:
            raise NotFoundError(f"service: this server has no {request.service[:80]!r}")
        return health_pb2.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, request: Any, context: Context) -> Any:
        """The statuses of all services."""
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined] # the stubs are older
            statuses={name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        )

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now and at each change, SERVICE_UNKNOWN for a service that this server does not have."""
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
                continue  # the status may have changed while the message was written
            if self._closed:
                raise UnavailableError("the server is shutting down", reason="DRAINING")
            await changed.wait()

    def _update(self, status: int) -> None:
        self._statuses = dict.fromkeys(self._statuses, status)
        self._changed.set()
        self._changed = asyncio.Event()
