"""Puts something around a servicer's method, whichever of the four kinds it is."""

from __future__ import annotations

import inspect
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def wrap_handler(
    handler: Handler,
    around: Callable[[Context], AbstractAsyncContextManager[None]],
    *,
    parse: Callable[[bytes], Any] | None = None,
    admit: Callable[[Any], Any] | None = None,
) -> Handler:
    """`handler` with each call run inside `around(context)`.

    `parse` takes the place of the handler's deserializer. `admit` sees the request (or the stream of them) inside
    `around` and returns what the method gets. A method that is an async generator is closed before `around` ends, so
    that its `finally` has run when the call is over; gRPC leaves a cancelled generator to the garbage collector.
    """
    make, behavior = _kind(handler)

    async def respond_once(request: Any, context: Context) -> Any:
        async with around(context):
            return await behavior(admit(request) if admit else request, context)

    async def respond_stream(request: Any, context: Context) -> None:
        async with around(context):
            await _write_all(behavior(admit(request) if admit else request, context), context)

    return make(
        respond_stream if handler.response_streaming else respond_once,
        request_deserializer=parse or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _write_all(responses: Any, context: Context) -> None:
    if inspect.isawaitable(responses):  # a handler that writes by itself
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


def _kind(handler: Handler) -> tuple[Callable[..., Handler], Callable[..., Any]]:
    """The constructor of the handler's kind, and the servicer's method."""
    make, behavior = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }[handler.request_streaming, handler.response_streaming]
    assert behavior is not None
    return make, behavior
