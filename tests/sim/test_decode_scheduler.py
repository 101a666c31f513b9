"""The decode scheduler on a virtual clock: sequences join and leave at every step, and each gets room in its turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.generation import FinishReason, SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from decode_worker.scheduler import DecodeScheduler, DecodeSequence

BLOCK_SIZE = 16


def sequence(attempt_id: str, *, prompt: int = 20, max_tokens: int = 5) -> DecodeSequence:
    return DecodeSequence(
        attempt_id=attempt_id,
        num_prompt_tokens=prompt,
        last_token_id=1,
        sampling=SamplingParams(),
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=frozenset()),
    )


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 150), st.integers(2, 40)), min_size=1, max_size=25),
    max_num_seqs=st.integers(1, 6),
    copy_steps=st.integers(0, 3),
    data=st.data(),
)
def test_whatever_arrives_runs_to_its_end_in_order_of_arrival(requests, max_num_seqs, copy_steps, data):
    pool = BlockPool(12, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, max_num_seqs)
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
    assert (piece.start_position, list(piece.token_ids)) == (20, [1])
    (first,) = scheduler.commit(scheduler.plan(), [5])
    assert (first.position, first.token_id, first.finish_reason) == (21, 5, None)
    scheduler.add(sequence("b"))
    scheduler.take_in()
    scheduler.end_copy("b", join=True)
    assert [piece.attempt_id for piece in scheduler.plan().slices] == ["a", "b"]


def test_the_room_for_the_whole_request_is_taken_at_once():
    pool = BlockPool(4, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, 4)
    scheduler.add(sequence("big", prompt=40, max_tokens=20))
    scheduler.add(sequence("small", prompt=1, max_tokens=2))
    assert [taken.attempt_id for taken in scheduler.take_in()] == ["big"]
    assert pool.num_used == 4
    assert scheduler.take_in() == []
    scheduler.end_copy("big", join=True)
    scheduler.remove("big")
    assert [taken.attempt_id for taken in scheduler.take_in()] == ["small"]


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
