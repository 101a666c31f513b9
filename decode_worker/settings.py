"""Settings of the decode worker."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import ByteSize, Field, model_validator

from baton.worker.settings import WORKER_ID_PATTERN, WorkerSettings, host_name
from kv_transfer.settings import ReaderHandoverSettings


def name_after_host() -> str:
    """A name that is unique where a host has one decode worker."""
    return f"decode-{host_name()}"


class DecodeWorkerSettings(WorkerSettings):
    """A worker that takes KV caches over and generates in one continuous batch."""

    class_name: ClassVar[str] = "decode_worker"

    handover: ReaderHandoverSettings = ReaderHandoverSettings()
    worker_id: str = Field(
        default_factory=name_after_host,
        pattern=WORKER_ID_PATTERN,
        description="Unique name, stable over restarts; default: decode-<host name>, so set it for two on one host; "
        "while a worker lives, another one of its name does not start",
    )
    max_unread_tokens: int = Field(
        default=128,
        ge=1,
        description="A sequence leaves the batch while more tokens of it than this wait for their reader, tokens",
    )

    swap_bytes: ByteSize = Field(
        default=ByteSize(256 * 1024**2),
        ge=0,
        description="Host memory for the KV blocks of sequences that gave way to others; 0: those are shed, bytes",
    )

    @model_validator(mode="after")
    def _check_batch_fits_budget(self) -> Self:
        if self.engine.max_num_seqs > self.engine.max_num_batched_tokens:
            raise ValueError(
                f"engine.max_num_seqs: {self.engine.max_num_seqs} sequences take a token each in a step, more than "
                f"engine.max_num_batched_tokens {self.engine.max_num_batched_tokens}"
            )
        return self
