"""The admission queue, as a gateway uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from baton.coordination.client import RedisConnection
    from baton.coordination.keys import Keys
    from baton.core.workers import Grant, Route, Ticket, WorkerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLimits:
    """One class of requests. `max_prefills` bounds its prefills that run at once, over all gateways; None: no bound.

    Classes take turns at free credit in the ratio of their `weight`.
    """

    max_waiting: int
    max_waiting_tokens: int
    max_prefills: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStatus:
    """One class's queue at a moment, over all gateways."""

    name: str
    num_waiting: int
    waiting_tokens: int
    num_prefills: int
    oldest_wait_s: float
    limits: ClassLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """One gateway's side of the queue."""

    gateway_id: str
    classes: Mapping[str, ClassLimits]
    lease_s: float = 5.0
    tick_s: float = 0.5
    call_timeout_s: float = 1.0
    settle_s: float = 1.5


class Place(Protocol):
    """A ticket in the queue."""

    position: int

    async def granted(self) -> Grant:
        """Waits for the pair of workers."""
        ...

    async def release_prefill(self) -> None:
        """Gives the prefill worker's credit back."""
        ...

    async def __aenter__(self) -> Place: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class AdmissionQueue(Protocol):
    """One gateway's side of the queue that all gateways of a model share.

    `AdmissionQueue(connection, keys, route, config)`; `run()` must run in a task group for as long as it is used.
    """

    def __init__(
        self,
        connection: RedisConnection,
        keys: Keys,
        route: Callable[[Ticket, Sequence[WorkerView]], Route | None],
        config: QueueConfig,
    ) -> None: ...

    @property
    def is_available(self) -> bool:
        """Whether Redis answers."""
        ...

    @property
    def num_live(self) -> int:
        """Tickets of this gateway that have not ended."""
        ...

    @property
    def views(self) -> Sequence[WorkerView]:
        """The live workers as last seen, at most about a `tick_s` ago while Redis answers."""
        ...

    async def run(self) -> None:
        """Dispatches, renews and rebuilds until cancelled; then releases all that this gateway holds."""
        ...

    def admit(self, ticket: Ticket) -> Place:
        """`async with queue.admit(ticket) as place:` enters the queue; leaving the block releases everything."""
        ...

    async def workers(self) -> Sequence[WorkerView]:
        """The live workers now."""
        ...

    async def status(self) -> list[ClassStatus]:
        """All classes of this gateway's configuration."""
        ...
