"""The lease table by example; tests/property has it under every order of events."""

from __future__ import annotations

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import AlreadyExistsError, ResourceExhaustedError
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.lease import LeaseOutcome, LeaseTable


class Fences:
    def __init__(self, num_slots: int) -> None:
        self.words = [0] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self.words)

    def store(self, slot: int, word: int) -> None:
        self.words[slot] = word


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def fences() -> Fences:
    return Fences(2)


@pytest.fixture
def table(fences, clock) -> LeaseTable:
    return LeaseTable(fences, clock, lease_s=5.0)


def test_a_grant_sets_the_fence_and_a_release_clears_it_and_names_the_blocks(table, fences):
    lease = table.grant("a", "attempt", [4, 7])
    assert lease.generation != 0
    assert fences.words[lease.slot] == lease.generation
    ended = table.release("a", LeaseOutcome.CONSUMED)
    assert ended is not None
    assert ended.lease.block_ids == (4, 7)
    assert ended.outcome is LeaseOutcome.CONSUMED
    assert fences.words == [0, 0]
    assert table.num_active == 0


def test_a_second_release_and_one_of_an_unknown_lease_end_nothing(table):
    table.grant("a", "attempt", [1])
    assert table.release("a", LeaseOutcome.ABANDONED) is not None
    assert table.release("a", LeaseOutcome.CONSUMED) is None
    assert table.release("never", LeaseOutcome.CONSUMED) is None


def test_a_lease_expires_at_its_deadline_and_not_before(table, clock):
    table.grant("a", "attempt", [1])
    clock.advance(4.9)
    assert table.expire() == []
    assert table.next_expiry_s() == pytest.approx(0.1)
    clock.advance(0.1)
    (ended,) = table.expire()
    assert ended.outcome is LeaseOutcome.EXPIRED
    assert ended.held_s == pytest.approx(5.0)
    assert table.next_expiry_s() is None


def test_a_renewal_counts_from_its_own_moment(table, clock):
    table.grant("a", "attempt", [1])
    clock.advance(4)
    assert table.renew("a") == 5.0
    clock.advance(4)
    assert table.expire() == []
    clock.advance(1)
    assert len(table.expire()) == 1


def test_an_overdue_lease_that_nobody_swept_may_still_be_renewed(table, clock):
    table.grant("a", "attempt", [1])
    clock.advance(60)
    table.renew("a")
    assert table.expire() == []


def test_an_ended_lease_cannot_be_renewed(table):
    table.grant("a", "attempt", [1])
    table.release("a", LeaseOutcome.CONSUMED)
    with pytest.raises(LeaseNotFoundError):
        table.renew("a")


def test_a_slot_never_sees_a_generation_twice(table, fences):
    seen = set()
    for i in range(50):
        lease = table.grant(f"l{i}", "attempt", [1])
        assert (lease.slot, lease.generation) not in seen
        seen.add((lease.slot, lease.generation))
        table.release(lease.lease_id, LeaseOutcome.CONSUMED)
    assert {slot for slot, _ in seen} == {0, 1}
    assert len({generation for _, generation in seen}) == 50


def test_a_full_table_refuses_with_the_limit_and_recovers(table):
    table.grant("a", "attempt", [1])
    table.grant("b", "attempt", [2])
    with pytest.raises(ResourceExhaustedError) as refusal:
        table.grant("c", "attempt", [3])
    assert refusal.value.reason == "LEASE_SLOTS_EXHAUSTED"
    assert refusal.value.metadata == {"limit": "2"}
    assert refusal.value.retry_after_s == 5.0
    table.release("a", LeaseOutcome.CONSUMED)
    table.grant("c", "attempt", [3])
    table.check_integrity()


def test_the_id_of_a_live_lease_is_refused_and_the_lease_unharmed(table, fences):
    lease = table.grant("a", "attempt", [1])
    with pytest.raises(AlreadyExistsError):
        table.grant("a", "other", [2])
    assert fences.words[lease.slot] == lease.generation


def test_the_end_of_the_source_ends_every_lease_once(table, fences):
    table.grant("a", "attempt", [1])
    table.grant("b", "attempt", [2])
    assert {ended.lease.lease_id for ended in table.end_all()} == {"a", "b"}
    assert table.end_all() == []
    assert fences.words == [0, 0]


def test_a_growing_lease_gets_blocks_and_does_not_expire_before_it_is_complete(table, fences, clock):
    lease = table.grant("a", "attempt", [4], is_growing=True)
    clock.advance(60)
    assert table.expire() == []
    assert table.next_expiry_s() is None
    assert table.renew("a") == 5.0
    assert table.grow("a", [7, 2]).block_ids == (4, 7, 2)
    clock.advance(60)
    assert table.expire() == []
    complete = table.grow("a", [5], is_complete=True)
    assert (complete.block_ids, complete.is_growing) == ((4, 7, 2, 5), False)
    assert (complete.slot, complete.generation) == (lease.slot, lease.generation)
    assert fences.words[lease.slot] == lease.generation
    assert table.next_expiry_s() == 5.0
    clock.advance(5)
    (ended,) = table.expire()
    assert ended.lease == complete


def test_a_growing_lease_that_ends_says_so_and_cannot_grow(table, fences):
    table.grant("a", "attempt", [4], is_growing=True)
    ended = table.release("a", LeaseOutcome.ABANDONED)
    assert ended is not None
    assert ended.lease.is_growing
    assert not any(fences.words)
    with pytest.raises(LeaseNotFoundError):
        table.grow("a", [7])
    table.check_integrity()
