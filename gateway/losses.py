"""A worker that failed an attempt: who it was, and what people are told of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.trace import get_current_span

from kv_transfer.errors import (
    ChecksumError,
    LeaseNotFoundError,
    NoTransportError,
    PeerGoneError,
    PoolMismatchError,
    StaleLeaseError,
    TransferFailedError,
)

if TYPE_CHECKING:
    from baton.core.errors import UnavailableError
    from baton.core.workers import Grant, Ticket, WorkerRecord

_log = logging.getLogger(__name__)

# What a decode worker says of the source of a KV cache.
_SOURCE_FAULTS = frozenset(
    kind.default_reason
    for kind in (
        ChecksumError,
        LeaseNotFoundError,
        NoTransportError,
        PeerGoneError,
        PoolMismatchError,
        StaleLeaseError,
        TransferFailedError,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why an attempt was cut off. `worker` is None when it was lost before the grant was heard of."""

    error: UnavailableError
    worker: WorkerRecord | None

    @property
    def role(self) -> str:
        """What the worker did, for metrics."""
        return self.worker.role.value if self.worker else "unknown"

    def tell(self, ticket: Ticket, *, num_output_tokens: int, num_retries: int) -> None:
        """An event and an attribute of the request's span, and a line in the log: another attempt follows."""
        worker_id = self.worker.worker_id if self.worker else "unknown"
        reason = self.error.metadata.get("worker_reason", self.error.reason)
        span = get_current_span()
        span.add_event("baton.worker_lost", {"baton.worker_id": worker_id, "baton.reason": reason})
        span.set_attribute("baton.num_retries", num_retries)
        _log.warning(
            "a worker was lost: its request goes on from where it is",
            extra={
                "request_id": ticket.request_id,
                "attempt_id": ticket.attempt_id,
                "worker_id": worker_id,
                "reason": reason,
                "num_output_tokens": num_output_tokens,
                "num_retries": num_retries,
            },
        )


def loss_of(error: UnavailableError, grant: Grant | None) -> Loss | None:
    """The loss that the failure of an attempt stands for; None when it is another failure.

    A stream that broke is its worker's fault, unless a decode worker says that it could not read the KV cache: then it
    is the source's.
    """
    if error.reason != "WORKER_LOST":
        return None
    if grant is None:
        return Loss(error=error, worker=None)
    is_decodes = error.metadata.get("worker_id") == grant.decode.worker_id
    is_source_fault = error.metadata.get("worker_reason") in _SOURCE_FAULTS
    return Loss(error=error, worker=grant.decode if is_decodes and not is_source_fault else grant.prefill)
