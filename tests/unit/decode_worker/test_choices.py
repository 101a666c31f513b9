"""Several outputs of one prompt in the decode engine: what they share, what each has, and how each ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.errors import InternalError, InvalidArgumentError
from baton.core.generation import FinishReason, SamplingParams
from baton.worker.messages import Cancel, Failed
from decode_worker.messages import Accept, EndChoice, Finished, HandedOver, Token
from tests.unit.decode_worker.test_engine_core import Bench, accept, grow, growing, regex

SEEDED = SamplingParams(seed=4)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def accept_many(attempt_id: str, *first_token_ids: int, num_tokens: int = 6, **changes) -> Accept:
    return replace(
        accept(attempt_id, num_tokens=num_tokens),
        first_token_ids=first_token_ids,
        num_choices=len(first_token_ids),
        sampling=SEEDED,
        **changes,
    )


def tokens_of(events, choice: int = 0) -> list[int]:
    return [event.token_id for event in events if isinstance(event, Token) and event.choice == choice]


def test_choices_share_full_blocks_and_what_lies_in_a_part_of_one_is_copied_once(bench):
    bench.turn(accept_many("a", 9, 8, 7))
    # Six positions fill one block of four, and half of another, which each choice has to itself.
    assert bench.pool.num_used == 1 + 3
    target = bench.copier.started["a"]
    bench.copier.finish("a")
    assert bench.copies == []
    bench.turn()
    assert [source for source, _ in bench.copies] == [target[1]] * 2
    copied = {block_id for _, block_id in bench.copies}
    assert copied == bench.pool.owned_by("a") - set(target)
    (plan,) = bench.executor.plans
    assert [(piece.choice, piece.token_ids, piece.start_position) for piece in plan.slices] == [
        (0, (9,), 6),
        (1, (8,), 6),
        (2, (7,), 6),
    ]
    assert {piece.block_table[0] for piece in plan.slices} == {target[0]}
    assert len({piece.block_table[1] for piece in plan.slices}) == 3
    events = bench.run_dry()
    assert [type(event) for event in events].count(Finished) == 1
    bench.core.check_integrity()


def test_nothing_is_copied_where_the_prompt_fills_its_blocks(bench):
    bench.join(accept_many("a", 9, 8, num_tokens=8))
    assert bench.copies == []
    assert bench.pool.num_used == 2 + 2


def test_each_choice_is_what_it_would_be_alone(bench):
    together = bench.join(accept_many("a", 9, 8, 7)) + bench.run_dry()
    for choice, first in enumerate((9, 8, 7)):
        alone = Bench()
        command = replace(accept_many("a", first), sampling=SEEDED.of_choice(choice))
        assert tokens_of(together, choice) == tokens_of(alone.join(command) + alone.run_dry())
    assert len({tuple(tokens_of(together, choice)) for choice in range(3)}) == 3


def test_a_choice_that_its_first_token_ends_is_passed_over_and_frees_its_block(bench):
    stop = replace(accept("a").stop, stop_token_ids=frozenset({8}))
    bench.turn(accept_many("a", 8, 9, 8, stop=stop))
    assert bench.pool.num_used == 4
    bench.copier.finish("a")
    events = bench.turn()
    assert bench.pool.num_used == 2
    assert isinstance(events[0], HandedOver)
    events += bench.run_dry()
    assert (len(tokens_of(events, 1)), tokens_of(events, 0), tokens_of(events, 2)) == (3, [], [])
    bench.join(accept_many("b", 8, 8, stop=stop))
    assert bench.pool.num_used == 0


def test_where_every_choice_has_ended_there_is_nothing_to_do(bench):
    stop = replace(accept("a").stop, stop_token_ids=frozenset({8}))
    (failed,) = bench.join(accept_many("a", 8, 8, stop=stop))
    assert isinstance(failed.error, InvalidArgumentError)
    bench.core.check_integrity()


def test_choices_end_one_by_one_and_the_last_ends_the_attempt(bench):
    stop = replace(accept("a").stop, max_tokens=20)
    bench.join(accept_many("a", 9, 8, 7, stop=stop))
    used = bench.pool.num_used
    # Again, and for one that never was, it is harmless.
    bench.turn(*[EndChoice(attempt_id="a", choice=choice) for choice in (1, 1, 5)])
    assert bench.pool.num_used < used
    assert {piece.choice for piece in bench.executor.plans[-1].slices} == {0, 2}
    events = bench.turn(after_step=[EndChoice(attempt_id="a", choice=0)])
    assert tokens_of(events) == []
    events = bench.turn(EndChoice(attempt_id="a", choice=2), EndChoice(attempt_id="gone", choice=0))
    assert [(type(event), event.reason) for event in events] == [(Finished, FinishReason.STOP)]
    bench.core.check_integrity()


def test_the_failure_of_one_choice_is_that_of_all_and_comes_once(bench):
    bench.join(accept("other"))
    bench.turn(accept_many("a", 9, 8, structure=regex("-3")))
    bench.copier.finish("a")
    events = bench.turn() + bench.run_dry()
    mine = [event for event in events if event.attempt_id == "a"]
    assert [type(event) for event in mine][-1] is Failed
    assert sum(event.is_last for event in mine) == 1
    bench.core.check_integrity()


def test_a_failed_step_and_a_cancel_end_an_attempt_once(bench):
    for end in ("step", "cancel"):
        bench.join(accept_many(end, 9, 8, 7))
        if end == "step":
            plan = bench.core.plan()
            bench.core.fail(plan, InternalError("a step failed"))
            events = bench.core.take_events()
        else:
            events = bench.turn(Cancel(attempt_id=end))
        assert [type(event) for event in events] == [Failed]
        bench.core.check_integrity()


def test_a_growing_cache_brings_the_first_tokens_of_all(bench):
    bench.turn(replace(growing("a"), num_choices=2, sampling=SEEDED))
    bench.turn(grow("a", 20, 21, 22, first_token_ids=(9, 8)))
    bench.copier.finish("a")
    events = bench.turn() + bench.run_dry()
    assert len(tokens_of(events, 0)) == len(tokens_of(events, 1)) == 3
    bench.core.check_integrity()


def test_there_are_seats_for_all_choices_or_none_is_taken_in(bench):
    bench.turn(accept_many("a", 9, 8), accept_many("b", 9, 8))
    assert bench.copier.started.keys() == {"a"}
    bench.copier.finish("a")
    bench.run_dry()
    assert bench.copier.started.keys() == {"b"}
