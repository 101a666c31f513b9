"""The server process's view of its engine: attempts and their events, and whether it makes progress."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from baton.core.errors import AlreadyExistsError, UnavailableError
from baton.engine.process import EngineDiedError
from baton.worker.engine_loop import EngineStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.core.clock import Clock
    from baton.core.errors import ServingError
    from baton.engine.process import EngineProcess
    from baton.worker.engine_loop import EventBatch


class AttemptEvent(Protocol):
    """What every event of an engine has."""

    @property
    def attempt_id(self) -> str:
        """Whose it is."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether the attempt is over, its blocks free."""
        ...


EventT = TypeVar("EventT", bound=AttemptEvent)


class Attempt(Generic[EventT]):
    """The events of one attempt, for one reader. Their number is bounded by what the attempt may generate."""

    def __init__(self, attempt_id: str) -> None:
        self.attempt_id = attempt_id
        self._events: deque[EventT] = deque()
        self._changed = asyncio.Event()
        self._error: ServingError | None = None
        self.is_over = False

    async def next_event(self) -> EventT:
        """The next event; waits for it. Raises what took the engine away."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()

    def peek(self) -> EventT | None:
        """The next event if it is here already; it stays the next one."""
        return self._events[0] if self._events else None

    def put(self, event: EventT) -> None:
        """Adds an event."""
        self._events.append(event)
        self.is_over = event.is_last
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """Ends the attempt from outside: no event will come any more."""
        self._error = error
        self.is_over = True
        self._changed.set()


class EngineClient(Generic[EventT]):
    """Carries attempts to an engine process and their events back.

    An attempt stays known until its last event, also when nobody reads it any more: so its id cannot be taken
    again while its blocks are in use, and a draining worker knows what it waits for.
    """

    def __init__(self, process: EngineProcess[Any, EventBatch], clock: Clock) -> None:
        self.stats = EngineStats()
        self._process = process
        self._clock = clock
        self._observers: list[Callable[[EventBatch], None]] = []
        self._attempts: dict[str, Attempt[EventT]] = {}
        self._all_over = asyncio.Event()
        self._all_over.set()
        self._death: ServingError | None = None
        self._num_sent = 0
        self._busy_since_s: float | None = None

    @property
    def num_attempts(self) -> int:
        """Attempts that are not over."""
        return len(self._attempts)

    def has_attempt(self, attempt_id: str) -> bool:
        """Whether the attempt is not over."""
        return attempt_id in self._attempts

    @property
    def busy_without_progress_s(self) -> float:
        """How long the engine has had something to do and shown nothing for it, in seconds."""
        return 0.0 if self._busy_since_s is None else self._clock.monotonic_s() - self._busy_since_s

    def add_observer(self, observe: Callable[[EventBatch], None]) -> None:
        """Has `observe` called with each batch, before those who read the attempts see it."""
        self._observers.append(observe)

    def start(self, attempt_id: str, command: Any) -> Attempt[EventT]:
        """Sends an attempt's first command. AlreadyExistsError while the id is in use; UnavailableError when dead."""
        if attempt_id in self._attempts:
            raise AlreadyExistsError(f"attempt {attempt_id} runs already", reason="ATTEMPT_EXISTS")
        self._send(command, is_control=False)
        attempt: Attempt[EventT] = Attempt(attempt_id)
        self._attempts[attempt_id] = attempt
        self._all_over.clear()
        return attempt

    def control(self, command: Any) -> None:
        """Sends a command that ends or extends what runs. Nothing happens when the engine is dead: all has ended."""
        if self._death is None:
            try:
                self._send(command, is_control=True)
            except EngineDiedError:
                return

    async def run(self) -> None:
        """Reads events until the engine is stopped. When it dies: fails all attempts and raises EngineDiedError."""
        try:
            async for batches in self._process.events():
                for batch in batches:
                    self._take(batch)
            self._end(UnavailableError("the worker is shutting down", reason="SHUTTING_DOWN"))
        except EngineDiedError as error:
            self._end(error)
            raise

    async def wait_all_over(self) -> None:
        """Returns when no attempt is left."""
        await self._all_over.wait()

    def _send(self, command: Any, *, is_control: bool) -> None:
        if self._death is not None:
            raise self._death
        self._process.send(command, is_control=is_control)
        self._num_sent += 1
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.monotonic_s()

    def _take(self, batch: EventBatch) -> None:
        self.stats = batch.stats
        is_busy = batch.stats.has_work or batch.num_commands < self._num_sent
        self._busy_since_s = self._clock.monotonic_s() if is_busy else None
        for observe in self._observers:
            observe(batch)
        for event in batch.events:
            attempt = self._attempts[event.attempt_id]
            attempt.put(event)
            if event.is_last:
                self._forget(event.attempt_id)

    def _forget(self, attempt_id: str) -> None:
        del self._attempts[attempt_id]
        if not self._attempts:
            self._all_over.set()

    def _end(self, error: ServingError) -> None:
        self._death = error
        for attempt_id in list(self._attempts):
            self._attempts[attempt_id].fail(error)
            self._forget(attempt_id)
