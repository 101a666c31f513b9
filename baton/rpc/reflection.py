"""Server reflection under both of its names.

grpcio-reflection speaks v1alpha only, and clients differ in which they ask for. The two differ in their package name
alone, so one servicer answers both with the same messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Lets clients list `services` (full names) and fetch their schemas."""
    servicer = reflection.aio.ReflectionServicer((*services, *_NAMES))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}) for name in _NAMES)
    )
