"""Settings of a gateway."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from baton.core.settings import (
    ComponentSettings,
    ModelSettings,
    RedisSettings,
    Section,
    ServerSettings,
    TelemetrySettings,
)


class GatewayServerSettings(ServerSettings):
    """The gateway's gRPC server."""

    port: int = Field(default=8470, ge=0, le=65535, description="Port to listen on; 0 picks a free one")


class QueueClassSettings(Section):
    """How much of one class may wait, and its share of the workers."""

    max_waiting: int = Field(default=256, ge=1, le=100_000, description="Most requests that wait, over all gateways")
    max_waiting_tokens: int = Field(
        default=262_144, ge=1, description="Most prompt tokens that wait, over all gateways, tokens"
    )
    max_prefills: int | None = Field(
        default=None, ge=1, description="Most prefills that run at once, over all gateways; None: as credit allows"
    )
    weight: float = Field(
        default=1.0, gt=0, le=1000, allow_inf_nan=False, description="Turns at free credit, relative to other classes"
    )


class ChatClassSettings(QueueClassSettings):
    """How much of class `chat` may wait, and its share of the workers."""

    weight: float = Field(
        default=4.0, gt=0, le=1000, allow_inf_nan=False, description="Turns at free credit, relative to other classes"
    )


class QueueSettings(Section):
    """The admission queue."""

    timeout_s: float = Field(
        default=30.0, gt=0, le=3600, allow_inf_nan=False, description="Longest wait for a pair of workers, seconds"
    )
    long_prompt_tokens: int = Field(
        default=1024,
        ge=1,
        description="Prompts from this length on wait in class `long`, shorter ones in `chat`, tokens",
    )
    chat: ChatClassSettings = Field(default_factory=ChatClassSettings)
    long: QueueClassSettings = Field(default_factory=QueueClassSettings)


class LimitSettings(Section):
    """What one request and one gateway may take."""

    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="Longest life of a request; a client's deadline may be shorter, seconds",
    )
    default_max_tokens: int = Field(
        default=512, ge=1, description="Tokens that are generated when a request says nothing, tokens"
    )
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="Threads that tokenize")
    max_pending_texts: int = Field(
        default=128, ge=1, le=10_000, description="Most texts in and before the tokenizer's threads"
    )


class GatewaySettings(ComponentSettings):
    """The public face of a deployment: admits, routes and streams."""

    class_name: ClassVar[str] = "gateway"

    model: ModelSettings
    redis: RedisSettings = Field(default_factory=RedisSettings)
    server: GatewayServerSettings = Field(default_factory=GatewayServerSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    queue: QueueSettings = Field(default_factory=QueueSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
