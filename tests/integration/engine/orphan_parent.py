"""A parent that is killed by a test: starts an engine process, prints its pid, waits. Arguments: target, spec."""

from __future__ import annotations

import asyncio
import sys

from baton.engine.process import EngineProcess
from tests.integration.engine import engine_children


async def main():
    engine = await EngineProcess.start(getattr(engine_children, sys.argv[1]), sys.argv[2])
    print(engine.pid, flush=True)
    async for _ in engine.events():
        pass


if __name__ == "__main__":
    asyncio.run(main())
