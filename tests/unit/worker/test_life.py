from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from baton.worker.life import WorkerLife


class Engine:
    """An engine with nothing to do."""

    busy_without_progress_s = 0.0
    stats = None
    num_attempts = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def wait_all_over(self) -> None:
        return


class Server:
    def __init__(self) -> None:
        self.health: list[bool] = []

    def set_serving(self, serving: bool) -> None:
        self.health.append(serving)

    async def drain(self, grace_s: float) -> None:
        return


class Registry:
    """Notes calls. A heartbeat is under way until `answer` is set, and loses a cancellation that meets it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def heartbeat(self, record: Any) -> None:
        self.calls.append("heartbeat")
        self.is_asked.set()
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            await self.answer.wait()

    async def deregister(self, worker_id: str, incarnation: str) -> None:
        self.calls.append("deregister")


async def test_no_heartbeat_comes_after_the_deregistration_even_when_its_cancellation_is_lost() -> None:
    registry, server, stop = Registry(), Server(), asyncio.Event()
    settings: Any = SimpleNamespace(stall_s=30.0, heartbeat_s=0.001, server=SimpleNamespace(drain_grace_s=1.0))
    description: Any = SimpleNamespace(worker_id="w", incarnation="i", record=lambda state, stats: None)
    life = WorkerLife(server, Engine(), registry, settings)  # type: ignore[arg-type]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(life.run(description, stop))
        await registry.is_asked.wait()
        stop.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert registry.calls == ["heartbeat"]
        registry.answer.set()
    assert registry.calls == ["heartbeat", "deregister"]
    assert server.health == [True, False]
