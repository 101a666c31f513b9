"""Settings that both workers have."""

from __future__ import annotations

import socket
from typing import Any, Self

from pydantic import Field, model_validator

from baton.core.settings import (
    ComponentSettings,
    EngineSettings,
    ModelSettings,
    RedisSettings,
    ServerSettings,
    TelemetrySettings,
)

WORKER_ID_PATTERN = r"^[A-Za-z0-9._-]{1,128}$"


def host_name() -> str:
    """This machine's name, as a part of a worker's default id."""
    return socket.gethostname()[:100]


def twice_max_num_seqs(values: dict[str, Any]) -> int:
    """Room for what is granted, and as much again of what is on its way out."""
    engine: EngineSettings = values["engine"]
    return max(256, 2 * engine.max_num_seqs)


class WorkerSettings(ComponentSettings):
    """Base of the two workers' settings."""

    model: ModelSettings
    redis: RedisSettings = RedisSettings()
    server: ServerSettings = ServerSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    engine: EngineSettings = EngineSettings()
    worker_id: str = Field(default_factory=host_name, pattern=WORKER_ID_PATTERN, description="Unique name")
    max_waiting: int = Field(
        default_factory=twice_max_num_seqs,
        ge=1,
        description="Most requests inside the worker; more are refused. At least engine.max_num_seqs; default: twice"
        " that, and 256 at least",
    )
    heartbeat_s: float = Field(
        default=0.5, ge=0.05, le=1, allow_inf_nan=False, description="Time between heartbeats, seconds"
    )
    stall_s: float = Field(
        default=30.0,
        ge=0.1,
        allow_inf_nan=False,
        description="With work to do and nothing to show for so long the worker calls itself NOT_SERVING, seconds",
    )

    @model_validator(mode="after")
    def _check_takes_what_is_granted(self) -> Self:
        if self.max_waiting < self.engine.max_num_seqs:
            raise ValueError(
                f"max_waiting: {self.max_waiting} requests are fewer than engine.max_num_seqs"
                f" {self.engine.max_num_seqs}, which gateways are granted"
            )
        return self
