from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import AlreadyExistsError, StartupError
from baton.worker import life as life_module
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
    """Notes calls. Heartbeats after the first are under way until `answer` is set, and lose a cancellation."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_asked = asyncio.Event()
        self.answer = asyncio.Event()

    async def heartbeat(self, record: Any) -> None:
        self.calls.append("heartbeat")
        if len(self.calls) == 1:
            return
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
        assert registry.calls == ["heartbeat", "heartbeat"]
        registry.answer.set()
    assert registry.calls == ["heartbeat", "heartbeat", "deregister"]
    assert server.health == [True, False]


class Refusing(Registry):
    """Says `num_refusals` times that the id is taken; then `stop` ends the worker."""

    def __init__(self, num_refusals: int, stop: asyncio.Event) -> None:
        super().__init__()
        self._num_refusals = num_refusals
        self._stop = stop

    async def heartbeat(self, record: Any) -> None:
        self.calls.append("heartbeat")
        if len(self.calls) <= self._num_refusals:
            raise AlreadyExistsError("w is the id of a live worker at elsewhere:1", reason="WORKER_ID_TAKEN")
        if len(self.calls) > self._num_refusals + 1:
            self._stop.set()


async def live(registry: Registry, stop: asyncio.Event, server: Server) -> None:
    settings: Any = SimpleNamespace(stall_s=30.0, heartbeat_s=0.01, server=SimpleNamespace(drain_grace_s=1.0))
    description: Any = SimpleNamespace(worker_id="w", incarnation="i", record=lambda state, stats: None)
    async with asyncio.timeout(20):
        await WorkerLife(server, Engine(), registry, settings).run(description, stop)  # type: ignore[arg-type]


async def test_a_worker_waits_for_its_own_last_life_to_be_forgotten_and_does_not_serve_till_then() -> None:
    server, stop = Server(), asyncio.Event()
    await live(Refusing(3, stop), stop, server)
    assert server.health == [True, False]


async def test_a_worker_whose_id_stays_taken_ends_without_having_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "_ID_WAIT_S", 0.05)
    server, stop = Server(), asyncio.Event()
    with pytest.raises(ExceptionGroup) as group:
        await live(Refusing(1000, stop), stop, server)
    (error,) = group.value.exceptions
    assert isinstance(error, StartupError)
    assert "worker_id: w is the id of a live worker at elsewhere:1" in str(error)
    assert server.health == []
