"""Connections to Redis.

Two clients: one for commands, pooled, with one quick retry for connections that a restart broke; one for the
subscription, whose reads block. Every script is idempotent, so the retry is safe.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from baton.core.errors import StartupError

if TYPE_CHECKING:
    from baton.core.settings import RedisSettings

# RESP2: the subscription has a connection of its own, so nothing here needs push messages.
_PROTOCOL = 2
_OLDEST_VERSION = (6, 2)
# `Commands` admits fewer calls at a time than there are connections; beyond this the pool would refuse.
_MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConnection:
    """The two clients of one process. Made by `connect`, closed by its owner."""

    commands: Redis
    subscriber: Redis

    async def close(self) -> None:
        """Closes all connections; no call may follow. Does not raise when Redis is away."""
        for client in (self.commands, self.subscriber):
            try:
                await client.aclose()
                await client.connection_pool.disconnect()
            except (RedisError, OSError):  # the other side is gone: nothing is left to close
                continue


async def connect(settings: RedisSettings) -> RedisConnection:
    """Connects and checks the server's version. Waits up to `socket_timeout_s`.

    Raises StartupError, one line, when Redis cannot be reached, refuses us or is older than 6.2.
    """
    try:
        connection = _clients(settings)
    except (ValueError, RedisError) as error:
        raise StartupError(f"redis.url: {_without_secret(settings.url)} is not a Redis address: {error}") from error
    try:
        async with asyncio.timeout(settings.socket_timeout_s):
            info = await connection.commands.info("server")
    except (RedisError, OSError, TimeoutError) as error:
        await connection.close()
        cause = str(error) or f"no answer in {settings.socket_timeout_s} s"
        raise StartupError(f"redis.url: cannot use Redis at {_without_secret(settings.url)}: {cause}") from error
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_VERSION:
        await connection.close()
        raise StartupError(f"redis.url: Redis at {_without_secret(settings.url)} is {version}; 6.2 or newer is needed")
    return connection


def _clients(settings: RedisSettings) -> RedisConnection:
    timeout_s = settings.socket_timeout_s
    commands = ConnectionPool.from_url(
        settings.url,
        max_connections=_MAX_CONNECTIONS,
        protocol=_PROTOCOL,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        # Not for timeouts: a Redis that stalls would be asked again while the request waits.
        retry=Retry(ConstantBackoff(0.02), 2, supported_errors=(RedisConnectionError,)),
    )
    subscriber = ConnectionPool.from_url(
        settings.url,
        max_connections=2,
        protocol=_PROTOCOL,
        decode_responses=True,
        socket_timeout=None,
        socket_connect_timeout=timeout_s,
        # Its owner must see each loss: what was published meanwhile is gone.
        retry=Retry(NoBackoff(), 0),
    )
    return RedisConnection(commands=Redis.from_pool(commands), subscriber=Redis.from_pool(subscriber))


def _without_secret(url: str) -> str:
    scheme, separator, rest = url.rpartition("@")
    return f"{scheme.split('://', 1)[0]}://***@{rest}" if separator and "://" in scheme else url
