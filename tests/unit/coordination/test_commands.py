"""What is told when Redis does not do as it is asked."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import NoPermissionError

from baton.coordination.commands import Commands
from baton.coordination.keys import Keys
from baton.core.errors import UnavailableError


class Moody:
    """A client whose calls fail while `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def evalsha(self, *_args: Any) -> list[str]:
        if self.error is not None:
            raise self.error
        return ["reply"]


async def test_the_cause_is_logged_once_for_each_time_that_redis_is_away(caplog: pytest.LogCaptureFixture) -> None:
    redis = Moody()
    commands = Commands(SimpleNamespace(commands=redis), Keys("n", "m"))
    caplog.set_level(logging.WARNING, "baton.coordination.commands")
    for _ in range(2):
        redis.error = NoPermissionError("this user has no permissions to run the 'evalsha' command")
        for _ in range(3):
            with pytest.raises(UnavailableError, match=r"Redis is away \(NoPermissionError\)"):
                await commands.call("workers")
        redis.error = None
        assert await commands.call("workers") == ["reply"]
    line = "Redis is away: NoPermissionError: this user has no permissions to run the 'evalsha' command"
    assert [record.getMessage() for record in caplog.records] == [line, line]
