"""The server interceptor that turns every failure into a status that its reader can use."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message

from baton.core.errors import InternalError, InvalidArgumentError, ServingError, UnavailableError
from baton.rpc.errors import to_status
from baton.rpc.handlers import Context, Handler, wrap_handler
from baton.rpc.wire import explain_malformed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_log = logging.getLogger(__name__)


class _Malformed:
    """Stands for a request that could not be parsed, until the call has a context to answer through."""

    def __init__(self, error: InvalidArgumentError) -> None:
        self.error = error


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends each failed call with the status of its error.

    A ServingError keeps its text and details; anything else is logged with its traceback and becomes INTERNAL with a
    general text. Bytes that are no valid message end in INVALID_ARGUMENT with the path of the field at fault. A
    handler's own `context.abort` and the call's cancellation pass through.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()
        self._ended: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refuses = False

    def refuse_new_calls(self) -> None:
        """From now on new calls, except for health, end with UNAVAILABLE, reason DRAINING. gRPC's own shutdown cancels
        calls that were on their way.
        """
        self._refuses = True

    async def wait_idle(self) -> None:
        """Returns when no call runs."""
        await self._idle.wait()

    def end_calls(self) -> None:
        """Ends all running calls with UNAVAILABLE, reason DRAINING. Cancelled by gRPC they would end with CANCELLED,
        which callers take for their own doing.
        """
        self._ended |= self._calls
        for task in self._calls:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler, guarded."""
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method: gRPC answers UNIMPLEMENTED
            return handler
        method = handler_call_details.method
        return wrap_handler(
            handler,
            lambda context: self._answered(method, context),
            parse=_tolerant(handler.request_deserializer),
            admit=_checked_stream if handler.request_streaming else _checked,
        )

    @asynccontextmanager
    async def _answered(self, method: str, context: Context) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self._idle.clear()
        try:
            if self._refuses and not method.startswith("/grpc.health."):
                raise _draining()
            yield
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError as error:
            if task in self._ended:
                task.uncancel()
                await context.abort(*to_status(_draining()))
            if task.cancelling():
                raise
            # Nobody cancelled the call: some await inside it was cancelled. gRPC would leave the client waiting.
            await _abort(method, context, error)
        except Exception as error:
            await _abort(method, context, error)
        finally:
            self._calls.discard(task)
            self._ended.discard(task)
            if not self._calls:
                self._idle.set()


def _draining() -> UnavailableError:
    return UnavailableError("the server is shutting down", reason="DRAINING")


async def _abort(method: str, context: Context, error: BaseException) -> None:
    """Ends the call with the error's status; raises AbortError."""
    cause = _serving_error(error)
    if cause is None or isinstance(cause, InternalError):
        _log.error("%s failed", method, exc_info=error)
    await context.abort(*to_status(cause or error))


def _serving_error(error: BaseException) -> ServingError | None:
    """The ServingError that `error` is, or the first one of a group that holds nothing else."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, BaseExceptionGroup):
        causes = [_serving_error(part) for part in error.exceptions]
        return causes[0] if all(causes) else None
    return None


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """`deserialize` that returns a `_Malformed` where it would raise: gRPC would answer INTERNAL without a word."""
    message_type = getattr(deserialize, "__self__", None)
    if deserialize is None or not (isinstance(message_type, type) and issubclass(message_type, Message)):
        return deserialize

    descriptor: Any = message_type.DESCRIPTOR

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed(explain_malformed(descriptor, data))

    return parse


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise request.error
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)
