"""Leases on finished KV caches: who may read which blocks, and until when.

A pure state machine: no I/O, no torch, the clock passed in. It lives in the prefill engine process, next to
the block pool, and is driven by that process alone.

    growing ──grow──▶ growing ──complete──▶ granted ──renew──▶ granted ──release or expire──▶ ended
       └──────────────────────────release──────────────────────────────────────────────────────▶

A growing lease is on a cache whose prompt is still computed: it names the blocks that are done, does not expire, for
whoever computes is alive, and its blocks are not to be freed before the computation has stopped.

Three rules make the handover safe, and each is kept here rather than by callers:

- A lease ends once. Whichever of release, expiry and shutdown comes first gets the `EndedLease`; later ones get
  None. Only an `EndedLease` names blocks to be freed, so nothing is freed twice.
- Blocks are named as ended only after the lease's fence word is cleared. A reader that checks the word after its
  copy therefore knows that nothing was written into the blocks meanwhile.
- A fence word is never 0 while its lease lives, and no two leases of one table ever have the same word. A reader
  with an old descriptor can't mistake a later lease of the same slot for its own.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from baton.core.errors import AlreadyExistsError, ResourceExhaustedError
from kv_transfer.errors import LeaseNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.clock import Clock


class LeaseOutcome(Enum):
    """How a lease ended."""

    CONSUMED = "consumed"
    ABANDONED = "abandoned"
    EXPIRED = "expired"


class FenceTable(Protocol):
    """One 64-bit word for each lease slot, where readers see it. All words are 0 at first."""

    @property
    def num_slots(self) -> int:
        """How many words there are."""
        ...

    def store(self, slot: int, word: int) -> None:
        """Sets a word in one store; visible to readers before anything that this process writes later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one reader to read `block_ids`. While it lives the blocks belong to the lease."""

    lease_id: str
    attempt_id: str
    slot: int
    generation: int
    block_ids: tuple[int, ...]
    is_growing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLease:
    """A lease that has just ended. Whoever receives it must free `lease.block_ids`, and nobody else will.

    When it was growing, all blocks of the attempt are still its computation's, and are freed after that.
    """

    lease: Lease
    outcome: LeaseOutcome
    held_s: float


@dataclass(slots=True)
class _Active:
    lease: Lease
    granted_at_s: float
    deadline_s: float


class LeaseTable:
    """All live leases of one pool. Not thread-safe; no call blocks.

    A lease that is past its deadline lives on until `expire` is called, and may still be renewed until then: the
    fence word decides, not the time. So a loop that was busy should apply renewals that arrived meanwhile before
    it calls `expire`.
    """

    def __init__(self, fences: FenceTable, clock: Clock, *, lease_s: float) -> None:
        self._fences = fences
        self._clock = clock
        self._lease_s = lease_s
        self._active: dict[str, _Active] = {}
        # First in, first out, so that a slot rests as long as possible before its next lease.
        self._free_slots = deque(range(fences.num_slots))
        self._last_generation = 0

    @property
    def lease_s(self) -> float:
        """How long a lease lasts from its grant or its last renewal, in seconds."""
        return self._lease_s

    @property
    def num_active(self) -> int:
        """Leases that have not ended."""
        return len(self._active)

    def grant(self, lease_id: str, attempt_id: str, block_ids: Sequence[int], *, is_growing: bool = False) -> Lease:
        """Lets one reader read `block_ids`, whose contents must be complete. The lease owns them from here on.

        A growing one gets the others by `grow`. Raises AlreadyExistsError for the id of a live lease, and
        ResourceExhaustedError when all slots are taken; the blocks then stay the caller's.
        """
        if lease_id in self._active:
            raise AlreadyExistsError(f"lease {lease_id} is live")
        if not self._free_slots:
            raise ResourceExhaustedError(
                f"all {self._fences.num_slots} lease slots are taken",
                reason="LEASE_SLOTS_EXHAUSTED",
                retry_after_s=self._lease_s,
                metadata={"limit": str(self._fences.num_slots)},
            )
        self._last_generation += 1
        lease = Lease(
            lease_id=lease_id,
            attempt_id=attempt_id,
            slot=self._free_slots.popleft(),
            generation=self._last_generation,
            block_ids=tuple(block_ids),
            is_growing=is_growing,
        )
        now_s = self._clock.monotonic_s()
        deadline_s = math.inf if is_growing else now_s + self._lease_s
        self._active[lease_id] = _Active(lease, granted_at_s=now_s, deadline_s=deadline_s)
        self._fences.store(lease.slot, lease.generation)
        return lease

    def grow(self, lease_id: str, block_ids: Sequence[int], *, is_complete: bool = False) -> Lease:
        """Lets a growing lease's reader read `block_ids` too; their contents are complete from here on.

        With `is_complete` these are the last ones: the lease must be renewed from now on, and owns all its blocks.
        LeaseNotFoundError when it has ended.
        """
        active = self._active.get(lease_id)
        if active is None:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        assert active.lease.is_growing, "a complete lease does not grow"
        # Another object, stored whole: other threads look at it.
        active.lease = replace(
            active.lease, block_ids=(*active.lease.block_ids, *block_ids), is_growing=not is_complete
        )
        if is_complete:
            active.deadline_s = self._clock.monotonic_s() + self._lease_s
        return active.lease

    def find(self, lease_id: str) -> Lease | None:
        """The lease while it lives: it is gone from here before anything else happens to its blocks.

        The one call that other threads may make: it is a single look-up.
        """
        active = self._active.get(lease_id)
        return None if active is None else active.lease

    def renew(self, lease_id: str) -> float:
        """Makes a lease last `lease_s` from now, and returns that. LeaseNotFoundError when it has ended."""
        active = self._active.get(lease_id)
        if active is None:
            raise LeaseNotFoundError(f"lease {lease_id} has ended")
        if not active.lease.is_growing:
            active.deadline_s = self._clock.monotonic_s() + self._lease_s
        return self._lease_s

    def release(self, lease_id: str, outcome: LeaseOutcome) -> EndedLease | None:
        """Ends a lease; None when it has ended before, so repeating is harmless."""
        return self._end(lease_id, outcome) if lease_id in self._active else None

    def expire(self) -> list[EndedLease]:
        """Ends every lease that is past its deadline. To be called on the owner's own clock, also when idle."""
        now_s = self._clock.monotonic_s()
        overdue = [lease_id for lease_id, active in self._active.items() if active.deadline_s <= now_s]
        return [self._end(lease_id, LeaseOutcome.EXPIRED) for lease_id in overdue]

    def next_expiry_s(self) -> float | None:
        """Seconds until `expire` has something to do, 0 when it has already; None without a lease that expires."""
        first_s = min((active.deadline_s for active in self._active.values()), default=math.inf)
        return None if first_s == math.inf else max(0.0, first_s - self._clock.monotonic_s())

    def end_all(self) -> list[EndedLease]:
        """Ends every lease as abandoned: the source shuts down."""
        return [self._end(lease_id, LeaseOutcome.ABANDONED) for lease_id in list(self._active)]

    def check_integrity(self) -> None:
        """Asserts that each slot is either free or of exactly one live lease."""
        slots = sorted([*self._free_slots, *(active.lease.slot for active in self._active.values())])
        assert slots == list(range(self._fences.num_slots)), f"lease slots lost or shared: {slots}"

    def _end(self, lease_id: str, outcome: LeaseOutcome) -> EndedLease:
        active = self._active.pop(lease_id)
        self._fences.store(active.lease.slot, 0)
        self._free_slots.append(active.lease.slot)
        return EndedLease(lease=active.lease, outcome=outcome, held_s=self._clock.monotonic_s() - active.granted_at_s)
