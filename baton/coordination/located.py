"""Connections to the server of a cluster that has a model's keys, wherever it is at the moment.

All keys of a model lie in one slot, so one node has them all, and connections to this node are all that is needed.
Which node that is, each new connection asks first; one that hears that the slot has moved closes, and the retry
connects to the new owner. (redis-py does the same for Sentinels: `SentinelConnectionPool`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import ClusterDownError, MovedError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HAS_MOVED = (MovedError, ClusterDownError)


class SlotOwner:
    """Finds the node that serves a slot; asks the nodes that it knows, those of the last answer first."""

    def __init__(self, seeds: Sequence[tuple[str, int]], slot: int, options: Mapping[str, Any]) -> None:
        """`options`: what a connection to any node takes, but for its address."""
        self._seeds = tuple(seeds)
        self._known = self._seeds
        self._slot = slot
        self._options = dict(options)

    async def find(self) -> tuple[str, int]:
        """Its address. Raises redis-py's ConnectionError when no node answers or none has the slot."""
        failure = "no node has the slot"
        for address in dict.fromkeys((*self._known, *self._seeds)):
            try:
                primaries = await self._ask(address)
            except (RedisError, OSError) as error:
                failure = str(error)
                continue
            owners = [primary for first, last, primary in primaries if first <= self._slot <= last]
            if owners:
                self._known = (owners[0], *(primary for _, _, primary in primaries))
                return owners[0]
        raise RedisConnectionError(f"the cluster is away: {failure}")

    async def _ask(self, address: tuple[str, int]) -> list[tuple[int, int, tuple[str, int]]]:
        """First slot, last slot and primary of each range, as the node at `address` sees them."""
        client = Redis(host=address[0], port=address[1], **self._options)
        try:
            ranges = await client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
        finally:
            await client.aclose()
        # A range is its first and last slot, its primary and its replicas; a node without an address is the asked one.
        return [(first, last, (primary[0] or address[0], primary[1])) for first, last, primary, *_ in ranges]


class OwnerConnection(Connection):
    """A connection to the node that `owner` finds; takes the arguments of its base besides."""

    def __init__(self, *, owner: SlotOwner, **options: Any) -> None:
        super().__init__(**options)
        self._owner = owner

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """Finds the owner and connects to it, unless it is connected."""
        if not self.is_connected:
            self.host, self.port = await self._owner.find()
        await super().connect_check_health(check_health, retry_socket_connect)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """As its base; ConnectionError, and the connection closed, when the node is not the owner any more."""
        try:
            return await super().read_response(*args, **options)
        except _HAS_MOVED as error:
            await self.disconnect()
            raise RedisConnectionError("the keys are on another node now") from error


class OwnerSSLConnection(OwnerConnection, SSLConnection):
    """The same over TLS."""
