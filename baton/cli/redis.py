"""The embedded Redis as a child of the supervisor."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from baton.cli.child import ChildExit, wait_for_death

if TYPE_CHECKING:
    from baton.coordination.embedded import EmbeddedRedis


class RedisChild:
    """One life of an `EmbeddedRedis`. The next life has the same address; the data is gone."""

    def __init__(self, redis: EmbeddedRedis) -> None:
        """Starts it; blocks some 30 ms. StartupError when it does not come up."""
        redis.start()
        self._redis = redis
        self.address = urlsplit(redis.url).path

    def terminate(self) -> None:
        """See `Running`."""
        if self._redis.returncode is None:
            os.kill(self._redis.pid, signal.SIGTERM)

    def kill(self) -> None:
        """See `Running`."""
        self._redis.kill()

    async def wait(self) -> ChildExit:
        """See `Running`."""
        try:
            await wait_for_death(self._redis.pid)
        finally:
            self._redis.kill()
        code = self._redis.returncode
        assert code is not None
        return ChildExit(code=code, last_error_line="")
