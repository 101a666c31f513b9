"""The one place that maps errors to gRPC statuses and back.

A status carries google.rpc details: ErrorInfo (reason, domain `baton`, metadata) always, BadRequest when a field is
at fault, RetryInfo and the trailer `grpc-retry-pushback-ms` when the service is full.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServingError,
    UnauthenticatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.any_pb2 import Any as AnyMessage

DOMAIN = "baton"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# A transport drops trailers beyond 8 KiB and the whole status with them; a message may quote what a client sent.
# Bytes, because a character of four is twelve in the trailer `grpc-message`.
_MAX_TEXT_BYTES = 512
_TOO_LARGE = re.compile(r"(?:received|sent) message larger than max \((\d+) vs\. (\d+)\)", re.IGNORECASE)

_CODES: dict[type[ServingError], grpc.StatusCode] = {
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    CancelledError: grpc.StatusCode.CANCELLED,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    InternalError: grpc.StatusCode.INTERNAL,
}
# Classes that are made from a message, a reason and metadata.
_PLAIN: dict[grpc.StatusCode, type[ServingError]] = {
    code: kind
    for kind, code in _CODES.items()
    if kind not in (InvalidArgumentError, OutOfRangeError, ResourceExhaustedError)
}


class RichStatus(NamedTuple):
    """What `ServicerContext.abort` takes, in its order."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status code that `error` ends a call with; INTERNAL for everything that is no ServingError."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: BaseException) -> RichStatus:
    """The status that tells a caller about `error`.

    Anything but a ServingError becomes a general text: what it says may be nobody's business.
    """
    if not isinstance(error, ServingError):
        error = InternalError("internal error; the server's log has the cause")
    code = code_of(error)
    message = _shorten(error.message)
    status = status_pb2.Status(code=code.value[0], message=message)
    metadata = {key: _shorten(value) for key, value in error.metadata.items()}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if isinstance(error, InvalidArgumentError | OutOfRangeError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shorten(error.field), description=_shorten(error.description), reason=error.reason
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    trailers: list[tuple[str, str | bytes]] = []
    if isinstance(error, ResourceExhaustedError):
        pushback_ms = -1  # a retrying client library stops at a negative value
        if error.retry_after_s is not None:
            pushback_ms = math.ceil(error.retry_after_s * 1000)
            delay = Duration()
            delay.FromMilliseconds(pushback_ms)
            status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        trailers.append((PUSHBACK_KEY, str(pushback_ms)))
    trailers.append((DETAILS_KEY, status.SerializeToString()))
    return RichStatus(code, message, tuple(trailers))


def from_call(error: grpc.aio.AioRpcError) -> ServingError:
    """The error that the peer raised: same class, field, limit, reason and time to retry.

    A status without our details comes from gRPC itself or from something between: its class follows the code.
    """
    info, violation, retry = _unpack(error)
    code, message = error.code(), error.details() or ""
    if info is None:
        return _from_transport(code, message)
    reason, metadata = info.reason, dict(info.metadata)
    if code is grpc.StatusCode.INVALID_ARGUMENT and violation is not None:
        return InvalidArgumentError(violation.field, violation.description, reason=reason)
    if code is grpc.StatusCode.OUT_OF_RANGE and violation is not None and "limit" in metadata:
        return OutOfRangeError(violation.field, violation.description, limit=_number(metadata["limit"]), reason=reason)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = None if retry is None else retry.retry_delay.ToTimedelta().total_seconds()
        return ResourceExhaustedError(message, reason=reason, retry_after_s=retry_after_s, metadata=metadata)
    return _PLAIN.get(code, InternalError)(message, reason=reason, metadata=metadata)


class _Details(NamedTuple):
    info: error_details_pb2.ErrorInfo | None
    violation: error_details_pb2.BadRequest.FieldViolation | None
    retry: error_details_pb2.RetryInfo | None


def _unpack(error: grpc.aio.AioRpcError) -> _Details:
    """Our details of a status; all None when it has none."""
    nothing = _Details(None, None, None)
    try:
        # The synchronous twin: the asynchronous one raises TypeError on AioRpcError.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except Exception:
        return nothing
    return nothing if status is None else _details(status.details)


def _details(details: Iterable[AnyMessage]) -> _Details:
    info, bad_request, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    found = {type(target) for detail in details for target in (info, bad_request, retry) if detail.Unpack(target)}
    return _Details(
        info if type(info) in found and info.domain == DOMAIN else None,
        bad_request.field_violations[0] if bad_request.field_violations else None,
        retry if type(retry) in found else None,
    )


def _from_transport(code: grpc.StatusCode, message: str) -> ServingError:
    """An error that no Baton process wrote."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if sizes := _TOO_LARGE.search(message):
            return ResourceExhaustedError(
                f"a message of {sizes[1]} bytes is larger than the limit of {sizes[2]} bytes",
                reason="MESSAGE_TOO_LARGE",
                retry_after_s=None,
                metadata={"size_bytes": sizes[1], "limit": sizes[2]},
            )
        return ResourceExhaustedError(message or "the peer is out of a resource", retry_after_s=None)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        # A server that stops cancels the calls that it has: whoever cancels a call here doesn't ask what became of it.
        # gRPC's text names addresses inside the deployment; the original stays the cause for logs.
        return UnavailableError("a process that is needed cannot be reached or went away", reason="PEER_UNREACHABLE")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgumentError("request", message or "refused by the peer")
    kind = _PLAIN.get(code)
    if kind is None:
        return InternalError(f"the peer answered {code.name}: {message}")
    return kind(message or f"the peer answered {code.name}")


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _shorten(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= _MAX_TEXT_BYTES:
        return text
    return f"{encoded[: _MAX_TEXT_BYTES - 3].decode(errors='ignore')}..."
