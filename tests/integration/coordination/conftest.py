"""A stage on the shared server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.coordination import Stage, open_stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.coordination.embedded import EmbeddedRedis


@pytest.fixture
async def stage(redis_server: EmbeddedRedis) -> AsyncIterator[Stage]:
    async with open_stage(redis_server.url) as opened:
        yield opened
