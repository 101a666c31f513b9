"""Connections to Redis.

Two clients: one for commands, pooled, with one quick retry for connections that a restart broke; one for the
subscription, whose reads block. Every script is idempotent, so the retry is safe.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis.asyncio import ConnectionPool, Redis, Sentinel
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.backoff import ConstantBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from baton.coordination.located import OwnerConnection, OwnerSSLConnection, SlotOwner
from baton.core.errors import StartupError
from baton.core.redis_url import RedisUrl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.keys import Keys
    from baton.core.settings import RedisSettings

# RESP2: the subscription has a connection of its own, so nothing here needs push messages.
_PROTOCOL = 2
_OLDEST_VERSION = (6, 2)
# `Commands` admits fewer calls at a time than there are connections; beyond this the pool would refuse.
_MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConnection:
    """The two clients of one process, and those of the Sentinels. Made by `connect`, closed by its owner."""

    commands: Redis
    subscriber: Redis
    asked: tuple[Redis, ...] = ()

    @classmethod
    def over(cls, pools: Sequence[ConnectionPool], asked: Sequence[Redis] = ()) -> RedisConnection:
        """Clients that own these two pools."""
        commands, subscriber = (Redis.from_pool(pool) for pool in pools)
        return cls(commands=commands, subscriber=subscriber, asked=tuple(asked))

    async def close(self) -> None:
        """Closes all connections; no call may follow. Does not raise when Redis is away."""
        for client in (self.commands, self.subscriber, *self.asked):
            try:
                await client.aclose()
                await client.connection_pool.disconnect()
            except (RedisError, OSError):  # the other side is gone: nothing is left to close
                continue


async def connect(settings: RedisSettings, keys: Keys) -> RedisConnection:
    """Connects to the server that has `keys` and checks its version. Waits up to `socket_timeout_s`.

    Raises StartupError, one line, when Redis cannot be reached, refuses us or is older than 6.2.
    """
    try:
        connection = _clients(settings, keys)
    except (ValueError, RedisError) as error:
        raise StartupError(f"redis.url: {settings.redacted_url} is not a Redis address: {error}") from error
    try:
        async with asyncio.timeout(settings.socket_timeout_s):
            info = await connection.commands.info("server")
    except (RedisError, OSError, TimeoutError) as error:
        await connection.close()
        cause = str(error) or f"no answer in {settings.socket_timeout_s} s"
        raise StartupError(f"redis.url: cannot use Redis at {settings.redacted_url}: {cause}") from error
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_VERSION:
        await connection.close()
        raise StartupError(f"redis.url: Redis at {settings.redacted_url} is {version}; 6.2 or newer is needed")
    return connection


def _clients(settings: RedisSettings, keys: Keys) -> RedisConnection:
    url = RedisUrl.parse(settings.url)
    options: dict[str, Any] = {
        **parse_url(url.single),
        "protocol": _PROTOCOL,
        "decode_responses": True,
        "socket_connect_timeout": settings.socket_timeout_s,
    }
    for_commands = {
        "max_connections": _MAX_CONNECTIONS,
        "socket_timeout": settings.socket_timeout_s,
        # Not for timeouts: a Redis that stalls would be asked again while the request waits.
        "retry": Retry(ConstantBackoff(0.02), 2, supported_errors=(RedisConnectionError,)),
    }
    # The subscription's owner must see each loss: what was published meanwhile is gone.
    for_subscriber = {"max_connections": 2, "socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    if not url.addresses:
        pools = [ConnectionPool(**options, **each) for each in (for_commands, for_subscriber)]
        return RedisConnection.over(pools)
    # Where to connect to is found anew for each connection.
    is_tls = options.pop("connection_class", None) is SSLConnection
    del options["host"], options["port"]
    asking = {**options, "ssl": is_tls, "socket_timeout": settings.socket_timeout_s, "retry": Retry(NoBackoff(), 0)}
    asking.pop("db", None)
    if url.service is not None:
        for secret in ("username", "password"):
            asking.pop(secret, None)
        sentinel = Sentinel(url.addresses, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        pools = [
            SentinelConnectionPool(url.service, sentinel, ssl=is_tls, **options, **each)  # type: ignore[no-untyped-call]
            for each in (for_commands, for_subscriber)
        ]
        return RedisConnection.over(pools, asked=sentinel.sentinels)
    owner = SlotOwner(url.addresses, key_slot(keys.all[0].encode()), asking)
    options |= {"connection_class": OwnerSSLConnection if is_tls else OwnerConnection, "owner": owner}
    return RedisConnection.over([ConnectionPool(**options, **each) for each in (for_commands, for_subscriber)])
