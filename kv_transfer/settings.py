"""Settings of the handover, a section of both workers' settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.core.settings import Section
from kv_transfer.descriptor import Transport

TransportName = Literal["cuda_ipc", "shm", "nccl", "gloo", "grpc"]


class HandoverSettings(Section):
    """How KV caches may travel."""

    transports: tuple[TransportName, ...] = Field(
        default=("cuda_ipc", "shm", "grpc"),
        min_length=1,
        description="Ways that may be used: cuda_ipc, shm, nccl, gloo, grpc. The cheapest that both workers have is"
        " taken. nccl and gloo open ports that know no authentication: name them in trusted networks only",
    )
    timeout_s: float = Field(
        default=5.0,
        ge=0.1,
        le=600,
        allow_inf_nan=False,
        description="A transfer that shows no progress for so long has failed, seconds",
    )

    @property
    def enabled(self) -> frozenset[Transport]:
        """The ways that may be used."""
        return frozenset(Transport(name) for name in self.transports)


class SourceHandoverSettings(HandoverSettings):
    """How a prefill worker hands KV caches over."""

    host_copy: bool = Field(
        default=False,
        description="Keep a copy of a KV pool in device memory in host memory, as large as the pool, so that it can be"
        " read over shm, gloo and grpc too. Several ranks on CUDA always do",
    )


class ReaderHandoverSettings(HandoverSettings):
    """How a decode worker takes KV caches over."""

    convert_dtype: bool = Field(
        default=False,
        description="Take KV caches of another element type over and convert them, and those of otherwise quantized"
        " weights: results then differ from those of a worker that computed the prompt itself",
    )
