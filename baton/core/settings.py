"""Settings that components share, as frozen sections. `baton.core.config` loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field

from baton.core.cgroup import usable_cores
from baton.core.config import ComponentSettings, redact
from baton.core.redis_url import RedisUrl, require_location

__all__ = [
    "ComponentSettings",
    "EngineSettings",
    "LeaseSettings",
    "ModelSettings",
    "RedisSettings",
    "Section",
    "ServerSettings",
    "TelemetrySettings",
    "redact",
]

_NAME = r"^[A-Za-z0-9._-]{1,64}$"


def _require_url(*schemes: str) -> AfterValidator:
    """Refuses what is no URL of one of `schemes` that names a host or a path."""

    def check(value: str) -> str:
        if urlsplit(value).scheme not in schemes:
            raise ValueError(f"must be a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}")
        return require_location(value)

    return AfterValidator(check)


def _check_redis_url(value: str) -> str:
    RedisUrl.parse(value)
    return value


def folder_name(values: dict[str, Any]) -> str:
    """Last part of the model folder's path."""
    path: Path = values["path"]
    return path.resolve().name


class Section(BaseModel):
    """Base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(Section):
    """The model that is served."""

    path: Path = Field(description="Folder with config.json, *.safetensors and tokenizer.json")
    name: str = Field(
        default_factory=folder_name,
        validate_default=True,
        pattern=_NAME,
        description="Name under which clients ask for the model, 1 to 64 of [A-Za-z0-9._-]",
    )
    max_context_tokens: int | None = Field(
        default=None, ge=2, description="Most tokens of prompt and output together; None: the model's own limit"
    )


class RedisSettings(Section):
    """Where queues and the worker registry live."""

    # Kept out of repr: it may hold a password.
    url: Annotated[str, AfterValidator(_check_redis_url)] = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,
        description="Server, redis://[user:password@]host:port/db or unix://path; redis+cluster://host:port,host:port;"
        " redis+sentinel://host:port,host:port/service/db; rediss instead of redis for TLS",
    )
    namespace: str = Field(
        default="baton", pattern=_NAME, description="First part of every key: deployments that share a server differ"
    )
    socket_timeout_s: float = Field(
        default=2.0, gt=0, le=60, allow_inf_nan=False, description="Longest wait for an answer, seconds"
    )

    @property
    def redacted_url(self) -> str:
        """The URL without user and password: fit for logs and errors."""
        return redact(self.url)


class ServerSettings(Section):
    """The component's gRPC server."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="Port to listen on; 0 picks a free one")
    advertise_host: str | None = Field(
        default=None, min_length=1, description="Host name that peers are told; None: `host`, or this machine's name"
    )
    max_message_bytes: ByteSize = Field(
        default=ByteSize(4 * 1024 * 1024), ge=1024, le=2**31 - 1, description="Largest message, in and out, bytes"
    )
    drain_grace_s: float = Field(
        default=10.0, ge=0, le=3600, allow_inf_nan=False, description="Time that running calls get at the end, seconds"
    )


class TelemetrySettings(Section):
    """Traces, metrics and logs."""

    otlp_endpoint: Annotated[str, _require_url("http", "https")] | None = Field(
        default=None, description="OTLP gRPC collector, http://host:4317 (https: with TLS); None: no traces"
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of requests that are traced when the caller does not decide"
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the Prometheus endpoint; 0 picks a free one; None: off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Least level shown")
    log_format: Literal["console", "json"] = Field(default="console", description="For people or for programs")
    show_start: bool = Field(
        default=False, description="Tell each phase of the start in a short line on standard output, not in the log"
    )


class EngineSettings(Section):
    """The process that computes."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of weights, activations and KV cache; auto: bfloat16 where that is fast, else float32",
    )
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="int8: matrices are quantized at load, to a quarter of float32's bytes; on CPUs only",
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Positions in a KV block, tokens")
    kv_cache_bytes: ByteSize | None = Field(
        default=None,
        ge=1024**2,
        description="Size of the KV pool, bytes (512MiB and the like are read); None: by memory_fraction",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the device's (on a CPU: the container's) memory that the worker takes; the pool gets what"
        " the rest leaves of it. None: 0.4, and on a CPU a pool of 1 GiB at most",
    )
    # A short prompt waits for the step of a long one: on a CPU 128 tokens take a good part of a second already.
    max_num_batched_tokens: int = Field(
        default=128, ge=1, description="Most tokens that one step computes; 2048 and more suit a GPU"
    )
    max_num_seqs: int = Field(default=32, ge=1, le=65536, description="Most sequences that run at a time")
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that compute each step together, each with a part of the heads; at most "
        "as many as the model has KV heads. On cuda each takes a device, from the first on",
    )
    num_threads: int = Field(
        default_factory=usable_cores,
        ge=1,
        le=1024,
        description="Most CPU threads that compute a step; engines of a host that are busy at a time divide the cores",
    )


class LeaseSettings(Section):
    """How long a finished KV cache is kept for its reader."""

    lease_s: float = Field(
        default=5.0, ge=0.1, le=600, allow_inf_nan=False, description="Life of a lease unless it is renewed, seconds"
    )
