"""Channels to other processes, one an address, reused by all calls."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from baton.rpc.tracing import TracingStreamInterceptor, TracingUnaryInterceptor

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class ChannelPool:
    """Owns the channels; belongs to one event loop. `close` ends them all."""

    def __init__(self, *, max_message_bytes: int, tracer: Tracer, lookahead_bytes: int | None = None) -> None:
        """With `lookahead_bytes` a peer's stream may be about as far ahead of its reader and no further."""
        self._options = client_options(max_message_bytes)
        if lookahead_bytes is not None:
            # Without this the window grows to megabytes, and a writer never notices that nobody reads.
            self._options += [("grpc.http2.lookahead_bytes", lookahead_bytes), ("grpc.http2.bdp_probe", 0)]
        self._tracer = tracer
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`; connects at its first call. Stays open until `forget` or `close`."""
        channel = self._channels.get(address)
        if channel is None:
            interceptors = [TracingUnaryInterceptor(self._tracer), TracingStreamInterceptor(self._tracer)]
            channel = grpc.aio.insecure_channel(address, options=self._options, interceptors=interceptors)
            self._channels[address] = channel
        return channel

    async def forget(self, address: str, grace_s: float = 0.0) -> None:
        """Closes the channel to a process that is gone; calls that still run get `grace_s`, then CANCELLED."""
        if channel := self._channels.pop(address, None):
            await channel.close(grace_s)

    async def close(self, grace_s: float = 0.0) -> None:
        """Closes all channels, together."""
        await asyncio.gather(*(self.forget(address, grace_s) for address in list(self._channels)))


def client_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel options for a peer of ours."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A peer that vanished without a FIN is found out while a stream idles; 15 s is above the 10 s that
        # servers ask for between pings.
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A restarted process is found within seconds; gRPC's own backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Peers are reached directly, whatever the environment says of proxies.
        ("grpc.enable_http_proxy", 0),
    ]
