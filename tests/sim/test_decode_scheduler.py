"""The decode scheduler on a virtual clock: sequences join and leave at every step, and each gets room in its turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.generation import FinishReason, SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence

BLOCK_SIZE = 16


def sequence(
    attempt_id: str, *, prompt: int = 20, max_tokens: int = 5, tenant: str = "", priority: int = 0
) -> DecodeSequence:
    return DecodeSequence(
        tenant=tenant,
        priority=priority,
        attempt_id=attempt_id,
        num_prompt_tokens=prompt,
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=frozenset()),
    )


def end_all_swaps(scheduler: DecodeScheduler) -> bool:
    """Makes room, with copies that take no time; whether nobody was shed for it."""
    swaps, shed = scheduler.make_room()
    for swap in swaps:
        assert scheduler.end_swap(swap.attempt_id, succeeded=True)
    return not shed


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 150), st.integers(2, 40)), min_size=1, max_size=25),
    max_num_seqs=st.integers(1, 6),
    copy_steps=st.integers(0, 3),
    data=st.data(),
)
def test_whatever_arrives_runs_to_its_end_in_order_of_arrival(requests, max_num_seqs, copy_steps, data):
    pool = BlockPool(12, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, max_num_seqs, BlockPool(100, BLOCK_SIZE))
    pending = sorted((at, f"a{index}", prompt, max_tokens) for index, (at, prompt, max_tokens) in enumerate(requests))
    alive: dict[str, int] = {}
    copying: list[tuple[int, str]] = []
    taken_order: list[str] = []
    arrival_order = [attempt_id for _, attempt_id, _, _ in pending]
    cancelled: set[str] = set()
    step = 0
    while pending or alive:
        assert step < 3000
        while pending and pending[0][0] <= step:
            _, attempt_id, prompt, max_tokens = pending.pop(0)
            scheduler.add(sequence(attempt_id, prompt=prompt, max_tokens=max_tokens))
            alive[attempt_id] = max_tokens - 1
        if alive and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(sorted(alive)))
            scheduler.remove(victim)
            cancelled.add(victim)
            if not any(attempt_id == victim for _, attempt_id in copying):
                del alive[victim]
        assert end_all_swaps(scheduler)
        taken_now = [taken.attempt_id for taken in scheduler.take_in()]
        taken_order += taken_now
        copying += [(step + copy_steps, attempt_id) for attempt_id in taken_now]
        for due, attempt_id in list(copying):
            if due <= step:
                copying.remove((due, attempt_id))
                assert scheduler.end_copy(attempt_id, join=True) is (attempt_id not in cancelled)
                if attempt_id in cancelled:
                    alive.pop(attempt_id, None)
        plan = scheduler.plan()
        plan.assert_fits(block_size=BLOCK_SIZE, num_blocks=pool.num_blocks)
        assert len(plan.slices) + len(copying) <= max_num_seqs
        for token in scheduler.commit(plan, [7] * len(plan.slices)):
            alive[token.attempt_id] -= 1
            assert (token.finish_reason is FinishReason.LENGTH) is (alive[token.attempt_id] == 0)
            if token.finish_reason is not None:
                assert scheduler.remove(token.attempt_id) is not None
                del alive[token.attempt_id]
        step += 1
    assert taken_order == [attempt_id for attempt_id in arrival_order if attempt_id in set(taken_order)]
    pool.check_integrity()
    assert pool.num_used == 0


def test_a_sequence_joins_the_step_after_its_copy_and_leaves_with_its_last_token():
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, 4)
    scheduler.add(sequence("a", prompt=20, max_tokens=4))
    assert [taken.attempt_id for taken in scheduler.take_in()] == ["a"]
    assert scheduler.plan().slices == ()
    assert scheduler.end_copy("a", join=True)
    (piece,) = scheduler.plan().slices
    # The first token stands behind the prompt; its keys and values are the first that this side computes.
    assert (piece.start_position, list(piece.token_ids)) == (20, [0])
    (first,) = scheduler.commit(scheduler.plan(), [5])
    assert (first.position, first.token_id, first.finish_reason) == (21, 5, None)
    scheduler.add(sequence("b"))
    scheduler.take_in()
    scheduler.end_copy("b", join=True)
    assert [piece.attempt_id for piece in scheduler.plan().slices] == ["a", "b"]


class Starved:
    """A scheduler with a pool of five blocks."""

    def __init__(self, num_slots: int = 8) -> None:
        self.pool = BlockPool(5, BLOCK_SIZE)
        self.swap = BlockPool(num_slots, BLOCK_SIZE) if num_slots else None
        self.scheduler = DecodeScheduler(self.pool, 8, self.swap)

    def run(self, *names: str, prompt: int = 30, max_tokens: int = 30) -> None:
        """Lets sequences join one after the other."""
        for name in names:
            self.scheduler.add(sequence(name, prompt=prompt, max_tokens=max_tokens))
            assert [taken.attempt_id for taken in self.scheduler.take_in()] == [name]
            assert self.scheduler.end_copy(name, join=True)

    def steps(self, count: int) -> tuple[list[tuple[str, bool]], list[str]]:
        """Runs steps; swaps end at once. (attempt, whether out) of each, and who was shed."""
        swapped, all_shed = [], []
        for _ in range(count):
            swaps, shed = self.scheduler.make_room()
            swapped += [(swap.attempt_id, swap.is_out) for swap in swaps]
            all_shed += [each.attempt_id for each in shed]
            for swap in swaps:
                self.scheduler.end_swap(swap.attempt_id, succeeded=True)
            plan = self.scheduler.plan()
            for token in self.scheduler.commit(plan, [7] * len(plan.slices)):
                if token.finish_reason is not None:
                    self.scheduler.remove(token.attempt_id)
        return swapped, all_shed

    def batch(self) -> list[str]:
        return [piece.attempt_id for piece in self.scheduler.plan().slices]

    def crowd(self) -> None:
        """a and b begin with two blocks each. a has taken the fifth, b waits for one, and a needs one more."""
        self.run("a", "b")
        assert self.steps(2) == ([], [])
        assert self.batch() == ["a", "b"]
        assert self.steps(16) == ([], [])
        assert self.batch() == ["a"]
        assert self.pool.num_free == 0


def test_a_sequence_gets_the_blocks_of_its_prompt_and_more_as_it_grows():
    starved = Starved()
    starved.run("a")
    assert starved.pool.num_used == 2
    starved.steps(2)
    assert starved.pool.num_used == 2
    starved.steps(1)
    assert starved.pool.num_used == 3


def test_nobody_is_taken_in_on_the_blocks_that_those_who_run_will_need_next():
    starved = Starved()
    starved.run("a", "b")
    starved.scheduler.add(sequence("c", prompt=1))
    assert starved.scheduler.take_in() == []
    starved.scheduler.remove("a")
    assert [taken.attempt_id for taken in starved.scheduler.take_in()] == ["c"]


def test_the_latest_gives_way_and_comes_back_before_anybody_is_taken_in():
    starved = Starved()
    starved.crowd()
    starved.scheduler.add(sequence("later", prompt=1, max_tokens=2))
    assert starved.steps(1) == ([("b", True)], [])
    assert starved.scheduler.take_in() == []
    starved.steps(1)
    assert (starved.pool.num_used, starved.swap.num_used) == (4, 2)
    assert starved.scheduler.take_in() == []
    assert starved.steps(11) == ([("b", False)], [])  # a has ended
    assert starved.batch() == ["b"]
    assert starved.swap.num_used == 0
    assert [taken.attempt_id for taken in starved.scheduler.take_in()] == ["later"]


def test_parked_ones_give_way_first_and_come_back_when_their_readers_do():
    starved = Starved()
    starved.run("a", "b")
    starved.steps(1)
    starved.scheduler.park("a")
    starved.steps(16)
    assert starved.pool.num_free == 0
    assert starved.steps(3)[0] == [("a", True)]
    assert (starved.scheduler.num_parked, starved.scheduler.num_waiting) == (1, 0)
    starved.scheduler.resume("a")
    assert (starved.scheduler.num_parked, starved.scheduler.num_waiting) == (0, 1)
    assert starved.steps(1)[0] == []  # b has not ended
    assert starved.steps(15)[0] == [("a", False)]
    assert starved.batch() == ["a"]


def test_one_that_is_parked_while_it_moves_is_parked_when_it_is_back():
    starved = Starved()
    starved.crowd()
    (swap,), _ = starved.scheduler.make_room()
    starved.scheduler.park("b")
    starved.scheduler.end_swap(swap.attempt_id, succeeded=True)
    starved.scheduler.remove("a")
    assert starved.scheduler.make_room() == ([], [])
    starved.scheduler.resume("b")
    (swap,), _ = starved.scheduler.make_room()
    assert not swap.is_out
    starved.scheduler.park("b")
    assert starved.scheduler.end_swap("b", succeeded=True)
    assert starved.batch() == []
    starved.scheduler.resume("b")
    assert starved.batch() == ["b"]


@pytest.mark.parametrize(("num_slots", "shed"), [(0, ["b"]), (1, ["b"]), (2, [])])
def test_where_the_swap_space_is_too_small_the_latest_is_shed(num_slots, shed):
    starved = Starved(num_slots)
    starved.crowd()
    assert starved.steps(2)[1] == shed
    assert starved.batch() == ["a"]
    assert starved.scheduler.preemptions.num_shed == len(shed)


def test_a_parked_one_is_not_shed_for_somebody_who_can_wait():
    starved = Starved(2)
    starved.crowd()
    starved.steps(2)
    starved.scheduler.park("a")
    assert starved.steps(2) == ([("b", False)], ["a"])  # nothing runs, and the swap space is full of b
    other = Starved(0)
    other.run("a", prompt=60, max_tokens=10)
    other.scheduler.park("a")
    other.scheduler.add(sequence("b"))
    assert other.steps(2) == ([], [])
    assert other.scheduler.take_in() == []


@pytest.mark.parametrize("is_out", [True, False])
@pytest.mark.parametrize("how", ["removed", "failed"])
def test_one_that_ends_while_it_moves_holds_its_blocks_until_the_copy_is_over(is_out, how):
    starved = Starved()
    starved.crowd()
    (swap,), _ = starved.scheduler.make_room()
    if not is_out:
        starved.scheduler.end_swap("b", succeeded=True)
        starved.scheduler.remove("a")
        (swap,), _ = starved.scheduler.make_room()
    assert (swap.attempt_id, swap.is_out) == ("b", is_out)
    held = starved.pool.num_used, starved.swap.num_used
    if how == "removed":
        assert starved.scheduler.remove("b") is None
    assert (starved.pool.num_used, starved.swap.num_used) == held
    assert starved.scheduler.end_swap("b", succeeded=how == "removed") is False
    starved.scheduler.remove("a")
    assert (starved.pool.num_used, starved.swap.num_used) == (0, 0)


def test_one_that_is_away_can_be_removed_at_once():
    starved = Starved()
    starved.crowd()
    starved.steps(1)
    assert starved.scheduler.preemptions.num_away == 1
    assert starved.scheduler.remove("b") is not None
    assert starved.swap.num_used == 0


def test_blocks_under_a_copy_rest_until_the_copy_ends():
    pool = BlockPool(4, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, 4)
    scheduler.add(sequence("a"))
    scheduler.take_in()
    assert scheduler.remove("a") is None
    assert pool.num_used == 2
    assert scheduler.end_copy("a", join=True) is False
    assert pool.num_used == 0


@pytest.mark.parametrize("removed_first", [True, False])
def test_a_failed_copy_frees_the_blocks_once(removed_first):
    pool = BlockPool(4, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, 4)
    scheduler.add(sequence("a"))
    scheduler.take_in()
    if removed_first:
        scheduler.remove("a")
    assert scheduler.end_copy("a", join=False) is False
    assert pool.num_used == 0
    assert scheduler.remove("a") is None


def first_to_give_way(*wanted: tuple[str, str, int]) -> str:
    """Of sequences (name, tenant, priority) that arrive in this order and outgrow the pool together."""
    pool, swap = BlockPool(3 * len(wanted), BLOCK_SIZE), BlockPool(100, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, len(wanted), swap)
    for name, tenant, priority in wanted:
        scheduler.add(sequence(name, prompt=BLOCK_SIZE + 10, max_tokens=60, tenant=tenant, priority=priority))
        for taken in scheduler.take_in():
            assert scheduler.end_copy(taken.attempt_id, join=True)
    assert scheduler.num_running == len(wanted)
    while not (swaps := scheduler.make_room()[0]):
        plan = scheduler.plan()
        scheduler.commit(plan, [7] * len(plan.slices))
    return swaps[0].attempt_id


def test_of_one_tenant_the_lowest_priority_gives_way_first_and_of_equal_ones_the_latest():
    low_first = [("low", "t", -1), ("old", "t", 0), ("high", "t", 2), ("young", "t", 0)]
    assert first_to_give_way(*low_first) == "low"
    equal = [("old", "t", 3), ("high", "t", 5), ("young", "t", 3)]
    assert first_to_give_way(*equal) == "young"


def test_other_tenants_do_not_notice_a_priority():
    mixed = [("other", "u", -10), ("modest", "t", 0), ("other too", "u", -10), ("proud", "t", 10)]
    assert first_to_give_way(*mixed) == "modest"  # gives its tenant's latest place
    boasting = [("other", "u", 0), ("proud", "t", 10)]
    assert first_to_give_way(*boasting) == "proud"
