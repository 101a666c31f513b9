"""Spans for calls, on both sides, with W3C trace context between them.

The contributed instrumentation leaves aborted and cancelled calls without a status and cancelled client calls without
a span; these are the cases that matter here. Attributes follow OpenTelemetry's RPC conventions.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.rpc.errors import code_of
from baton.rpc.handlers import Context, Handler, wrap_handler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

# Probes are many and say nothing.
_UNTRACED = ("/grpc.health.", "/grpc.reflection.")
# What workers ask each other belongs to a request's trace. Where it has none (probes of peers; pulls by an engine,
# whose server records the handover as a whole), a trace of its own would tell nobody anything.
_NEVER_ROOT = "/baton.v1.KvTransferService/"
_TRACE_KEYS = frozenset({"traceparent", "tracestate"})
# A server's span is an error when the server is at fault; a client's span is one whenever the call failed.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_PROPAGATOR = TraceContextTextMapPropagator()


class TracingServerInterceptor(grpc.aio.ServerInterceptor):
    """A server span a call, child of the caller's span; the current span while the handler runs.

    Has to stand before (outside) the ErrorInterceptor.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler, traced."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_UNTRACED):
            return handler
        carrier = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if key in _TRACE_KEYS and isinstance(value, str)
        }
        parent = _PROPAGATOR.extract(carrier, otel_context.Context())
        if method.startswith(_NEVER_ROOT) and not _is_valid(parent):
            return handler
        return wrap_handler(handler, lambda context: self._traced(method, parent, context))

    @asynccontextmanager
    async def _traced(self, method: str, parent: otel_context.Context, context: Context) -> AsyncIterator[None]:
        span = _start(self._tracer, method, SpanKind.SERVER, parent)
        token = otel_context.attach(set_span_in_context(span, parent))
        code = grpc.StatusCode.OK
        try:
            yield
            code = _code_in(context)
        except grpc.aio.AbortError:
            code = _code_in(context)
            raise
        except asyncio.CancelledError:
            left_s = context.time_remaining()
            late = left_s is not None and left_s <= 0
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except BaseException as error:
            code = code_of(error)
            raise
        finally:
            otel_context.detach(token)
            _end(span, code, is_error=code in _SERVER_FAULTS)


class TracingUnaryInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """A client span a unary call."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """The call, traced until it is done."""
        return await _trace_call(self._tracer, continuation, client_call_details, request)


class TracingStreamInterceptor(grpc.aio.UnaryStreamClientInterceptor):
    """A client span a call with a stream of responses."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_unary_stream(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        """The call, traced until it is done."""
        return await _trace_call(self._tracer, continuation, client_call_details, request)


async def _trace_call(
    tracer: Tracer, continuation: Callable[..., Awaitable[Any]], details: grpc.aio.ClientCallDetails, request: Any
) -> Any:
    method = _text(details.method)
    if method.startswith(_UNTRACED) or (method.startswith(_NEVER_ROOT) and not _is_valid(None)):
        return await continuation(details, request)
    span = _start(tracer, method, SpanKind.CLIENT, None)
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span))
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in carrier.items():
        metadata[key] = value
    try:
        call = await continuation(_with_metadata(details, metadata), request)
    except BaseException as error:
        code = grpc.StatusCode.CANCELLED if isinstance(error, asyncio.CancelledError) else grpc.StatusCode.UNKNOWN
        _end(span, code, is_error=True)
        raise
    # Whatever ends the call, its reader or its canceller, ends the span: nothing here waits for the call.
    call.add_done_callback(lambda done: _end_client(span, _code_of_done(done)))
    return call


def _is_valid(context: otel_context.Context | None) -> bool:
    """Whether a span made in this context, the current one for None, would be a child."""
    return get_current_span(context).get_span_context().is_valid


def _with_metadata(details: grpc.aio.ClientCallDetails, metadata: grpc.aio.Metadata) -> grpc.aio.ClientCallDetails:
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


def _text(method: Any) -> str:
    """grpc.aio hands interceptors bytes where its types say str."""
    return method.decode() if isinstance(method, bytes) else str(method)


def _start(tracer: Tracer, method: str, kind: SpanKind, parent: otel_context.Context | None) -> Span:
    name = method.removeprefix("/")
    return tracer.start_span(name, parent, kind, {"rpc.system.name": "grpc", "rpc.method": name})


def _end_client(span: Span, code: grpc.StatusCode) -> None:
    _end(span, code, is_error=code is not grpc.StatusCode.OK)


def _end(span: Span, code: grpc.StatusCode, *, is_error: bool) -> None:
    if span.is_recording():
        span.set_attribute("rpc.response.status_code", code.name)
        if is_error:
            # The code alone: a status message may quote what a client sent.
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", code.name)
    span.end()


def _code_in(context: Context) -> grpc.StatusCode:
    """What the handler or its abort set; grpc.aio keeps None until then."""
    code: grpc.StatusCode | None = context.code()
    return code or grpc.StatusCode.OK


def _code_of_done(call: grpc.aio.Call) -> grpc.StatusCode:
    """The code of a call that is done. Its coroutine has nothing left to wait for, so one step finishes it."""
    coroutine: Any = call.code()
    try:
        coroutine.send(None)
    except StopIteration as finished:
        code: grpc.StatusCode = finished.value
        return code
    coroutine.close()
    return grpc.StatusCode.UNKNOWN
