"""The Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import start_http_server

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from baton.core.settings import TelemetrySettings


class MetricsEndpoint:
    """Serves `registry` at `http://host:port/metrics` from a thread of its own until `close`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """StartupError that names the address when it cannot be had."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise StartupError(f"telemetry.metrics_port: cannot listen on {host}:{port}: {reason}") from None

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stops serving. Blocks until the thread has ended, half a second at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics(settings: TelemetrySettings, registry: CollectorRegistry, host: str) -> MetricsEndpoint | None:
    """The endpoint that the settings ask for, on the host that the gRPC server listens on; None when it is off."""
    return None if settings.metrics_port is None else MetricsEndpoint(registry, host, settings.metrics_port)
