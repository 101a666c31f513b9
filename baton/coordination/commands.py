"""Runs the scripts: bounded in time, with one typed error when Redis is away."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from hashlib import sha1
from importlib import resources
from typing import TYPE_CHECKING, Any

from redis.exceptions import AskError, NoScriptError, RedisError, TryAgainError

from baton.core.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.coordination.client import RedisConnection
    from baton.coordination.keys import Keys

_log = logging.getLogger(__name__)

_NAMES = (
    "heartbeat",
    "deregister",
    "workers",
    "admit",
    "readmit",
    "grant",
    "reserve",
    "release",
    "renew",
    "restore",
    "status",
    "audit",
)

# Calls of one instance at a time. Redis runs one script after the other anyway.
_MAX_CALLS = 16

# What a cluster's node says while the keys are on the way to another one: for some milliseconds, as a rule.
_ON_THE_WAY = (AskError, TryAgainError)
_NEXT_TRY_S = 0.02


class Commands:
    """The scripts of one model. Loaded again by themselves when Redis has forgotten them."""

    def __init__(self, connection: RedisConnection, keys: Keys, *, timeout_s: float = 1.0) -> None:
        self._redis = connection.commands
        self._keys = keys.all
        self._timeout_s = timeout_s
        # By name: the digest by which Redis knows the script, and its text.
        self._scripts: dict[str, tuple[str, str]] = {}
        self._is_available = True
        self._slots = asyncio.Semaphore(_MAX_CALLS)
        folder = resources.files("baton.coordination") / "scripts"
        common = (folder / "common.lua").read_text(encoding="utf-8")
        for name in _NAMES:
            body = (folder / f"{name}.lua").read_text(encoding="utf-8")
            text = common + body
            self._scripts[name] = sha1(text.encode(), usedforsecurity=False).hexdigest(), text

    @property
    def is_available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._is_available

    async def call(self, name: str, *args: str | int | float) -> Any:
        """Runs the script `name`; the reply's strings are decoded. Waits at most `timeout_s`.

        Raises UnavailableError when Redis is away, stalled or loading, or the keys are on the way to another node for
        so long. The script may have run all the same: each is idempotent.
        """
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                with no_lost_cancel():
                    reply = await self._run(name, len(self._keys), *self._keys, *args)
        except (RedisError, OSError, TimeoutError) as error:
            cause = type(error).__name__
            if self._is_available:  # once: what follows has the same cause as a rule
                _log.warning("Redis is away: %s: %s", cause, error or f"no answer in {self._timeout_s:g} s")
            self._is_available = False
            raise UnavailableError(f"Redis is away ({cause}); try again", reason="REDIS_UNAVAILABLE") from error
        self._is_available = True
        return reply

    async def _run(self, name: str, num_keys: int, *args: str | int | float) -> Any:
        digest, text = self._scripts[name]
        while True:
            try:
                try:
                    return await self._redis.evalsha(digest, num_keys, *args)
                except NoScriptError:
                    # With its text, in one call: one that loads it first could reach another node.
                    return await self._redis.eval(text, num_keys, *args)
            except _ON_THE_WAY:
                await asyncio.sleep(_NEXT_TRY_S)


@contextmanager
def no_lost_cancel() -> Iterator[None]:
    """Raises, at the end of the block, a cancellation of the current task that came in it and was lost.

    redis-py sends with asyncio.wait_for, which on Python 3.11 returns normally when it is cancelled just as its work
    is done. A task that was being cancelled before the block goes on: it cleans up.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
