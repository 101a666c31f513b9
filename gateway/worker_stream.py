"""A worker's response stream, every failure of it an error that the client of the gateway can use."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from baton.core.errors import (
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
    ServingError,
    UnavailableError,
)
from baton.rpc.errors import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.core.workers import WorkerRecord


class WorkerStream:
    """One response stream of one worker."""

    def __init__(self, call: Any, worker: WorkerRecord) -> None:
        self._call = call
        self.worker = worker

    async def read(self) -> Any:
        """The next response; None at a good end. A ServingError when the worker failed, refused or vanished."""
        with told_by(self.worker):
            response = await self._call.read()
        return None if response is grpc.aio.EOF else response

    async def end(self) -> None:
        """Reads what is left, so that the call ends with its own status and not with our cancellation."""
        while await self.read() is not None:
            pass

    def fault(self, description: str) -> InternalError:
        """The error for a stream that breaks the contract."""
        return InternalError(
            f"{_name(self.worker)} {description}",
            reason="WORKER_PROTOCOL",
            metadata={"worker_id": self.worker.worker_id},
        )

    def cut_short(self) -> UnavailableError:
        """The error for a stream that ended before its last event."""
        return UnavailableError(
            f"{_name(self.worker)} ended its stream too early",
            reason="WORKER_LOST",
            metadata={"worker_id": self.worker.worker_id},
        )

    def cancel(self) -> None:
        """Cancels the call; without effect when it has ended."""
        self._call.cancel()


@contextmanager
def told_by(worker: WorkerRecord) -> Iterator[None]:
    """Turns the failure of a call into an error that the client of the gateway can use."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _seen_by_client(from_call(error), worker) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc.aio raises this for a call that was ended by the other side, or by its closed channel.
        raise _lost(worker, "cancelled the call") from error


def _seen_by_client(error: ServingError, worker: WorkerRecord) -> ServingError:
    """A worker's refusal is not the client's fault: its request was valid, and another try may meet another worker."""
    if isinstance(error, DeadlineExceededError):
        return DeadlineExceededError(f"{_name(worker)}: {error.message}", reason=error.reason)
    if isinstance(error, ResourceExhaustedError):
        return ResourceExhaustedError(
            f"{_name(worker)}: {error.message}",
            reason=error.reason,
            retry_after_s=error.retry_after_s,
            metadata=error.metadata,
        )
    if isinstance(error, InternalError):
        return InternalError(
            f"{_name(worker)}: {error.message}", reason=error.reason, metadata={"worker_id": worker.worker_id}
        )
    return _lost(worker, error.message, reason=error.reason)


def _lost(worker: WorkerRecord, message: str, *, reason: str = "") -> UnavailableError:
    return UnavailableError(
        f"{_name(worker)}: {message}",
        reason="WORKER_LOST",
        metadata={"worker_id": worker.worker_id, **({"worker_reason": reason} if reason else {})},
    )


def _name(worker: WorkerRecord) -> str:
    return f"{worker.role.value} worker {worker.worker_id}"
