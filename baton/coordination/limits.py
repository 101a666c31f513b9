"""What a queue is told by its configuration, and what it shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLimits:
    """One class of requests. `max_prefills` bounds its prefills that run at once, over all gateways; None: no bound.

    Classes take turns at free credit in the ratio of their `weight`. When a class is full, a tenant with less than an
    equal part of it is admitted all the same, until it holds twice as much.
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
    """One gateway's side of the queue.

    `gateway_id` is unique to the process. A ticket ends `lease_s` after its gateway's last renewal, one each `tick_s`;
    no call waits longer than `call_timeout_s`; a new or lost database admits and grants nothing for `settle_s`, in
    which all gateways put back what they run. When a class has granted nothing for `reserve_after_s` though its head
    could run on idle workers, what becomes free on one pair is kept for that head, one at a time. Names of classes and
    tenants contain neither '|' nor '}'.
    """

    gateway_id: str
    classes: Mapping[str, ClassLimits]
    lease_s: float = 5.0
    tick_s: float = 0.5
    call_timeout_s: float = 1.0
    settle_s: float = 1.5
    reserve_after_s: float = 5.0

    @property
    def lease_ms(self) -> int:
        """The lease as scripts take it."""
        return round(self.lease_s * 1000)
