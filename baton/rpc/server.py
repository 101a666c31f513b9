"""The gRPC server that each component runs: its options, health, reflection, start and end."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import StartupError
from baton.rpc.health import HealthService
from baton.rpc.interceptors import ErrorInterceptor
from baton.rpc.reflection import add_reflection
from baton.rpc.tracing import TracingServerInterceptor

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.descriptor import ServiceDescriptor
    from opentelemetry.trace import Tracer

    from baton.core.settings import ServerSettings

Servicer = TypeVar("Servicer")
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# Time that handlers get to clean up after the grace.
_END_S = 2.0
_WILDCARDS = ("0.0.0.0", "::", "[::]")


class ServingServer:
    """Owns one grpc.aio server. Add services, `start`, then `set_serving`; `drain` at the end, whatever happened.

    Made inside the event loop that it serves on. Health says NOT_SERVING until `set_serving(True)`.
    """

    def __init__(self, settings: ServerSettings, tracer: Tracer) -> None:
        self._settings = settings
        self._errors = ErrorInterceptor()
        self._server = grpc.aio.server(
            interceptors=[TracingServerInterceptor(tracer), self._errors],
            options=server_options(settings.max_message_bytes),
        )
        self._health = HealthService()
        self._services: list[str] = []
        self._port = 0
        self._started = False

    def add(
        self,
        add_to_server: Callable[[Servicer, grpc.aio.Server], None],
        servicer: Servicer,
        service: ServiceDescriptor,
    ) -> None:
        """Adds a service, e.g. `add(add_XServicer_to_server, servicer, x_pb2.DESCRIPTOR.services_by_name["X"])`."""
        add_to_server(servicer, self._server)
        self._services.append(service.full_name)
        self._health.add(service.full_name)

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        return self._port

    @property
    def address(self) -> str:
        """`host:port` under which peers reach this server; after `start`."""
        host = self._settings.advertise_host or self._settings.host
        if host in _WILDCARDS:
            host = socket.gethostname()
        return _join(host, self._port)

    async def start(self) -> None:
        """Binds and listens. StartupError that names the address when it cannot be had."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection((*self._services, _HEALTH), self._server)
        address = _join(self._settings.host, self._settings.port)
        await asyncio.to_thread(_require_free, self._settings.host, self._settings.port)
        try:
            self._port = self._server.add_insecure_port(address)
        except RuntimeError:  # taken in the meantime
            raise StartupError(f"server.port: cannot listen on {address}") from None
        await self._server.start()
        self._started = True

    def set_serving(self, serving: bool) -> None:
        """What health answers for the server and each of its services. Watches are told."""
        self._health.set_serving(serving)

    async def drain(self, grace_s: float | None = None) -> None:
        """Ends the server: NOT_SERVING, new calls refused, `grace_s` for those that run, then UNAVAILABLE for them.

        None: the settings' grace. Returns when the handlers have ended, at the latest 2 s after the grace. Safe to
        call twice and before `start`.
        """
        self._health.close()
        if not self._started:
            return
        if grace_s is None:
            grace_s = self._settings.drain_grace_s
        self._errors.refuse_new_calls()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._errors.wait_idle()
        self._errors.end_calls()
        await self._server.stop(_END_S)


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Server options that fit `baton.rpc.channels.client_options`."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Proxies and clients ping idle connections; without these two they are answered with too_many_pings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        # A client that vanished without a FIN loses its calls, and they their resources.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # By default a second server on the same port starts and takes half of the first one's connections.
        ("grpc.so_reuseport", 0),
    ]


def _require_free(host: str, port: int) -> None:
    """Raises StartupError with the system's reason when the address cannot be bound.

    gRPC would say only that it failed, and print the reason to stderr by itself. Blocks to resolve `host`.
    """
    address = _join(host, port)
    try:
        family, kind, proto, _, target = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise StartupError(f"server.host, server.port: cannot listen on {address}: {reason}") from None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
