"""Settings of a gateway."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from baton.coordination.limits import ClassLimits
from baton.core.generation import MAX_CHOICES
from baton.core.settings import (
    ComponentSettings,
    ModelSettings,
    RedisSettings,
    Section,
    ServerSettings,
    TelemetrySettings,
)
from gateway.classes import QueueClass, QueueClasses


class GatewayServerSettings(ServerSettings):
    """The gateway's gRPC server."""

    port: int = Field(default=8470, ge=0, le=65535, description="Port to listen on; 0 picks a free one")


class QueueClassSettings(Section):
    """One class of requests: which prompts wait in it, how much may wait, and its share of the workers."""

    max_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt of the class, tokens beyond what some worker should have cached; None: any",
    )
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
    queue_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, allow_inf_nan=False, description="Longest wait for a pair of workers, seconds"
    )
    request_timeout_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="Longest life of a request of the class, seconds; None: limits.request_timeout_s",
    )


_DEFAULT_CLASSES: dict[str, dict[str, float]] = {"chat": {"max_prompt_tokens": 1023, "weight": 4.0}, "long": {}}


class QueueSettings(Section):
    """The admission queue."""

    reserve_after_s: float = Field(
        default=5.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="How long a class may stand still before what becomes free is kept for its next request, seconds",
    )
    classes: dict[Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,32}$")], QueueClassSettings | None] = Field(
        default_factory=dict,
        validate_default=True,
        description="Classes by name. chat (prompts below 1024 tokens, weight 4) and long (the others) are there unless"
        " they are set to null; exactly one class has no max_prompt_tokens",
    )

    @field_validator("classes", mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = {name: values for name, values in _DEFAULT_CLASSES.items() if name not in given}
        refined = {
            name: _DEFAULT_CLASSES.get(name, {}) | values if isinstance(values, dict) else values
            for name, values in given.items()
        }
        return defaults | refined

    @field_validator("classes")
    @classmethod
    def _checked(cls, classes: dict[str, QueueClassSettings | None]) -> dict[str, QueueClassSettings]:
        present = {name: settings for name, settings in classes.items() if settings is not None}
        bounds = [settings.max_prompt_tokens for settings in present.values()]
        if bounds.count(None) != 1:
            raise ValueError("exactly one class must have no max_prompt_tokens")
        if len(set(bounds)) < len(bounds):
            raise ValueError("two classes have the same max_prompt_tokens")
        return present

    @property
    def queue_classes(self) -> QueueClasses:
        """The classes as sessions and the queue take them."""
        return QueueClasses(
            QueueClass(
                name=name,
                max_prompt_tokens=chosen.max_prompt_tokens,
                queue_timeout_s=chosen.queue_timeout_s,
                request_timeout_s=chosen.request_timeout_s,
                limits=ClassLimits(
                    max_waiting=chosen.max_waiting,
                    max_waiting_tokens=chosen.max_waiting_tokens,
                    max_prefills=chosen.max_prefills,
                    weight=chosen.weight,
                ),
            )
            for name, chosen in self.classes.items()
            if chosen is not None
        )


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
    max_retries: int = Field(
        default=2,
        ge=0,
        le=10,
        description="Most times that a request is computed again because a worker was lost; then it fails",
    )
    max_choices: int = Field(
        default=8, ge=1, le=MAX_CHOICES, description="Most outputs of one prompt that a request may ask for (its n)"
    )
    reserved_output_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of max_tokens that a request has blocks reserved for on a decode worker. Below 1 more run at"
        " a time, and give way to each other when their answers are longer than that",
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
    shares_prefixes: bool = Field(
        default=False,
        description="Whether tenants share cached beginnings of prompts; then a tenant can learn, by the time that a"
        " prompt takes, that another one has sent its beginning",
    )
