"""Keeps a set of child processes running, and ends all of them together."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from baton.cli.child import ChildExit, adopt_orphans
from baton.cli.restart import RestartPolicy
from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

    from baton.core.clock import Clock


class ChildState(Enum):
    """Where a child stands in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not ready"
    RESTARTING = "restarting"
    ENDING = "ending"
    ENDED = "ended"


class Running(Protocol):
    """One life of a child."""

    @property
    def address(self) -> str:
        """Where it listens, or will: what its `watch` is given."""
        ...

    def terminate(self) -> None:
        """Asks it to drain and end; nothing happens when it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once; nothing happens when it has ended."""
        ...

    async def wait(self) -> ChildExit:
        """Waits for its end; when cancelled, ends it first. No process of it is left on return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run and how to see that it is ready.

    `start` begins a life and is given where output lines go; it raises OSError or StartupError. `watch` follows the
    readiness at the life's address. `needs` are names that must be ready before the first start. `drain_s` is how
    long it may take to end when asked to.
    """

    name: str
    start: Callable[[Callable[[str], None]], Running]
    watch: Callable[[str], AsyncGenerator[bool, None]]
    needs: tuple[str, ...] = ()
    drain_s: float = 15.0


class Observer(Protocol):
    """Who is told what happens. Called on the event loop; must not block for long."""

    def changed(self, name: str, state: ChildState, detail: str) -> None:
        """A child's state changed; `detail` is its address, or the reason in a few words."""
        ...

    def line(self, name: str, text: str) -> None:
        """A child wrote a line."""
        ...


@dataclass(slots=True)
class _Slot:
    """One child over all its lives."""

    spec: ChildSpec
    policy: RestartPolicy
    state: ChildState = ChildState.WAITING
    child: Running | None = None
    was_ready: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Runs stages of children; a stage ends only after the later ones have.

    A child that dies is started again after a growing delay. Everything ends when it is asked to, when a child
    cannot start at all, or when one keeps dying.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        observer: Observer,
        clock: Clock,
        new_policy: Callable[[], RestartPolicy] = RestartPolicy,
    ) -> None:
        self._stages = [[_Slot(spec, new_policy()) for spec in stage] for stage in stages]
        self._slots = {slot.spec.name: slot for stage in self._stages for slot in stage}
        self._observer = observer
        self._clock = clock
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: StartupError | None = None

    def request_stop(self) -> None:
        """Drains and ends all; called a second time it kills them."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    async def wait_ready(self) -> None:
        """Returns when each child has been ready once. Never returns when they end before."""
        for slot in self._slots.values():
            await slot.ready.wait()

    async def run(self) -> None:
        """Runs until asked to stop; no child is left when it returns. StartupError when a child made it give up."""
        adopt_orphans()
        async with asyncio.TaskGroup() as tasks:
            for slot in self._slots.values():
                tasks.create_task(self._keep(slot), name=slot.spec.name)
            await self._stop.wait()
            await self._end_all()
        if self._failure is not None:
            raise self._failure

    async def _keep(self, slot: _Slot) -> None:
        """Runs one child, life after life, until it is told to stop."""
        try:
            await _first_of(slot.stop.wait(), self._wait_for_needs(slot))
            while not slot.stop.is_set():
                started_s = self._clock.monotonic_s()
                ended = await self._live(slot)
                if slot.stop.is_set():
                    break
                delay_s = slot.policy.delay_s_after(self._clock.monotonic_s() - started_s)
                if delay_s is None or (ended.code > 0 and not slot.was_ready):
                    self._give_up(slot, ended)
                    break
                self._set(slot, ChildState.RESTARTING, f"{ended.reason}; again in {delay_s:g} s")
                await _first_of(slot.stop.wait(), asyncio.sleep(delay_s))
        finally:
            self._set(slot, ChildState.ENDED, "")
            slot.ended.set()

    async def _live(self, slot: _Slot) -> ChildExit:
        """One life of a child, from its start to its last process's end."""
        spec = slot.spec
        self._set(slot, ChildState.STARTING, "")
        try:
            slot.child = child = spec.start(lambda line: self._observer.line(spec.name, line))
        except (OSError, StartupError) as error:
            return ChildExit(code=1, last_error_line=f"cannot start: {error}")
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._follow(slot, child.address))
                ended = await child.wait()
                watch.cancel()
        finally:
            slot.child = None
        return ended

    async def _follow(self, slot: _Slot, address: str) -> None:
        async with aclosing(slot.spec.watch(address)) as readings:
            async for ready in readings:
                if slot.stop.is_set():
                    return
                if ready:
                    slot.was_ready = True
                    slot.ready.set()
                    self._set(slot, ChildState.READY, address)
                elif slot.state is ChildState.READY:
                    self._set(slot, ChildState.NOT_READY, address)

    async def _wait_for_needs(self, slot: _Slot) -> None:
        for name in slot.spec.needs:
            await self._slots[name].ready.wait()

    def _give_up(self, slot: _Slot, ended: ChildExit) -> None:
        if self._failure is None:
            name = slot.spec.name  # a component's own line begins with it
            self._failure = StartupError(f"{name}: {ended.reason.removeprefix(f'{name}: ')}")
        self._stop.set()

    async def _end_all(self) -> None:
        for stage in reversed(self._stages):
            for slot in stage:
                slot.stop.set()
                if slot.child is not None:
                    self._set(slot, ChildState.ENDING, "")
                    slot.child.terminate()
            drain_s = max(slot.spec.drain_s for slot in stage)
            await _first_of(
                _all(slot.ended for slot in stage),
                self._kill.wait(),
                asyncio.sleep(drain_s),
            )
            for slot in stage:
                if slot.child is not None:
                    why = "asked to end a second time" if self._kill.is_set() else "did not end in time"
                    self._observer.line(slot.spec.name, f"{why}: killed")
                    slot.child.kill()
            await _all(slot.ended for slot in stage)

    def _set(self, slot: _Slot, state: ChildState, detail: str) -> None:
        if slot.state is not state or state is ChildState.RESTARTING:
            slot.state = state
            self._observer.changed(slot.spec.name, state, detail)


async def _all(events: Iterable[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them does; the others are cancelled."""
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(wait) for wait in waits]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
