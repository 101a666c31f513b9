"""Which processes `baton up` runs, and with what settings."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cli.child import Child
from baton.cli.readiness import watch_grpc, watch_redis
from baton.cli.redis import RedisChild
from baton.cli.supervisor import ChildSpec
from baton.core.errors import StartupError
from baton.core.fingerprint import tokenizer_fingerprint, weights_fingerprint
from baton.engine.config_file import read_config
from decode_worker.settings import DecodeWorkerSettings
from gateway.settings import GatewaySettings
from prefill_worker.settings import PrefillWorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from baton.coordination.embedded import EmbeddedRedis
    from baton.core.config import ComponentSettings

REDIS = "redis"
GATEWAY = "gateway"
SETTINGS: dict[str, type[ComponentSettings]] = {
    component.class_name: component for component in (PrefillWorkerSettings, DecodeWorkerSettings, GatewaySettings)
}
WORKERS = (PrefillWorkerSettings.class_name, DecodeWorkerSettings.class_name)
LOOPBACK = "127.0.0.1"
# Beyond the time that a component gives its own running calls.
DRAIN_MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What `baton up` was asked to do. `flags` go to every component, `host` and `port` to the gateway.

    `default_model` is the folder for a component whose settings name none.
    """

    flags: Sequence[str]
    default_model: Path
    host: str | None
    port: int | None
    demo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What is run: stages for the supervisor, and where the gateway will answer."""

    stages: Sequence[Sequence[ChildSpec]]
    address: str
    model: str

    @property
    def names(self) -> list[str]:
        """All children's names, in the order of their start."""
        return [spec.name for stage in self.stages for spec in stage]


def plan(launch: Launch, redis: EmbeddedRedis) -> Topology:
    """One gateway, one prefill and one decode worker on this machine.

    What `launch` does not say comes from the environment and the YAML file, as when they are started by hand.
    `redis` is run too, unless a setting names a Redis; the caller stops it when all is over. Blocks for small files.
    StartupError when a setting is wrong, the model folder is not there or the gateway's port is taken.
    """
    given = {"--server.host": launch.host, "--server.port": launch.port}
    flags = {name: _with_model(component, launch) for name, component in SETTINGS.items()}
    own_flags = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    settings = GatewaySettings.load([*flags[GATEWAY], *own_flags])
    _require_model(settings.model.path)
    host, port = settings.server.host, settings.server.port or free_port(settings.server.host)
    require_free(host, port)
    embedded = "url" not in settings.redis.model_fields_set

    def component(name: str, host: str, port: int) -> ChildSpec:
        def start(on_line: Callable[[str], None]) -> Child:
            chosen = port or free_port(host)
            command = [sys.executable, "-P", "-m", name, *flags[name], "--telemetry.show_start"]
            if embedded:  # it has an address once it runs
                command += ["--redis.url", redis.url]
            command += ["--server.host", host, "--server.port", str(chosen)]
            return Child(command, on_line, address=f"{_reachable(host)}:{chosen}")

        return ChildSpec(
            name=name,
            start=start,
            watch=watch_grpc,
            needs=(REDIS,) if embedded else (),
            drain_s=settings.server.drain_grace_s + DRAIN_MARGIN_S,
        )

    stages = [[component(name, LOOPBACK, 0) for name in WORKERS], [component(GATEWAY, host, port)]]
    if embedded:
        stages.insert(0, [ChildSpec(name=REDIS, start=lambda _: RedisChild(redis), watch=watch_redis)])
    return Topology(stages=stages, address=f"{_reachable(host)}:{port}", model=settings.model.name)


def _with_model(settings: type[ComponentSettings], launch: Launch) -> list[str]:
    """The component's flags, with the default model where neither they nor the environment or the file name one."""
    if settings.is_named(launch.flags, "model", "path"):
        return [*launch.flags]
    return [*launch.flags, "--model.path", str(launch.default_model)]


def _require_model(folder: Path) -> None:
    """StartupError for a folder that no component could use: here, before they import their libraries to find out."""
    if not folder.is_dir() and folder.suffix != ".gguf":
        raise StartupError(f"model.path: {folder} is no folder; `make model` fetches the sample model")
    try:
        weights_fingerprint(folder)
        tokenizer_fingerprint(folder)
        read_config(folder)
    except StartupError as error:
        raise StartupError(f"model.path: {error}") from None


def _reachable(host: str) -> str:
    """Where to call a server of this machine that listens on `host`."""
    return LOOPBACK if host in ("0.0.0.0", "::", "[::]") else host


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listens on now. StartupError when `host` is no address of this machine."""
    return _bind(host, 0)


def require_free(host: str, port: int) -> None:
    """StartupError when somebody listens on the port: their health would be taken for ours."""
    _bind(host, port)


def _bind(host: str, port: int) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            bound: int = probe.getsockname()[1]
            return bound
    except OSError as error:
        raise StartupError(f"server.port: cannot listen on {host}:{port}: {error.strerror}") from error
