from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    ResourceExhaustedError,
)
from baton.core.generation import FinishReason, LogprobOptions, SamplingParams, StopRule, Structure, StructureKind
from baton.core.model import KVLayout
from baton.core.prefixes import PrefixDigests
from baton.engine.block_pool import BlockPool
from baton.engine.executor import ScriptedExecutor, scripted_token
from baton.worker.engine_loop import EngineLoop
from baton.worker.messages import Cancel, Failed
from kv_transfer.lease import LeaseOutcome, LeaseTable
from prefill_worker.engine_core import PrefillCore
from prefill_worker.messages import (
    CacheGrown,
    FirstToken,
    PromptDone,
    PromptScored,
    Released,
    ReleaseLease,
    RenewLease,
    Started,
    Submit,
)
from prefill_worker.scheduler import PrefillLimits, PrefillScheduler

GREEDY = SamplingParams(temperature=0.0)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 32
LEASE_S = 5.0


class Fences:
    """A fence table that asserts, at every clearing, that the blocks are still owned: credit follows the fence."""

    num_slots = 4

    def __init__(self) -> None:
        self.words = [0] * self.num_slots

    def store(self, slot: int, word: int) -> None:
        self.words[slot] = word


class Structures:
    """A structure's text says after how many tokens it is complete; below 0 it cannot be followed so far."""

    class Matcher:
        def __init__(self, limit: int) -> None:
            self.limit, self.num_tokens, self.is_complete, self.allowed = limit, 0, False, bytearray(b"\xff" * 32)

        def append(self, token_id: int) -> None:
            self.num_tokens += 1
            if self.num_tokens == -self.limit:
                raise ResourceExhaustedError("too complex", retry_after_s=None)
            self.is_complete = self.num_tokens == self.limit

    def start(self, structure: Structure, stop_token_ids) -> Matcher:
        if structure.text == "0":
            raise InvalidArgumentError("structure.regex", "allows no output")
        return self.Matcher(int(structure.text))


def regex(text: str) -> Structure:
    return Structure(StructureKind.REGEX, text)


class Bench:
    """A prefill engine without processes: commands are given and turns are taken by hand."""

    def __init__(self, *, prefix_cache: bool = True) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.fences = Fences()
        self.executor = ScriptedExecutor(layout=LAYOUT, num_blocks=NUM_BLOCKS)
        limits = PrefillLimits(max_num_batched_tokens=8, max_num_seqs=4, oldest_share=0.25)
        leases = LeaseTable(self.fences, self.clock, lease_s=LEASE_S)
        scheduler = PrefillScheduler(self.pool, limits, PrefixDigests(LAYOUT.block_size) if prefix_cache else None)
        self.core = PrefillCore(scheduler, leases, self.clock, Structures())
        self.loop = EngineLoop(self.core, self.executor, self.clock, interrupts=self.core)

    def turn(self, *commands, during=()):
        """`during[i]` is what the loop finds when it looks for the i-th time: in a step's one pause, then after it."""
        return [event for batch in self.batches(*commands, during=during) for event in batch.events]

    def batches(self, *commands, during=()):
        looks, batches = iter(during), []
        self.loop.turn(list(commands), lambda: list(next(looks, ())), batches.append)
        return batches

    def run_dry(self, *commands):
        events = self.turn(*commands)
        while self.core.idle_s == 0:
            events += self.turn()
        return events

    def assert_clean(self):
        self.core.check_integrity()
        assert self.fences.words == [0] * Fences.num_slots
        assert self.core.idle_s is None


@pytest.fixture
def bench():
    return Bench()


def submit(attempt_id: str, num_tokens: int, *, max_tokens: int = 5, stop_ids=()) -> Submit:
    return Submit(
        attempt_id=attempt_id,
        lease_id=f"lease-{attempt_id}",
        token_ids=list(range(1, num_tokens + 1)),
        sampling=GREEDY,
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=frozenset(stop_ids)),
    )


def test_an_engine_whose_blocks_are_all_under_leases_is_not_taken_for_stuck(bench):
    num_tokens = NUM_BLOCKS * LAYOUT.block_size
    bench.run_dry(submit("a", num_tokens))
    (batch,) = bench.batches(submit("waits", num_tokens))
    assert (batch.stats.num_waiting, batch.stats.num_held) == (1, 1)
    assert not batch.stats.has_work
    assert not batch.stats.is_idle
    *_, done = bench.run_dry(Cancel(attempt_id="a"))
    assert isinstance(done, PromptDone)
    bench.turn(Cancel(attempt_id="waits"))
    bench.assert_clean()


def test_a_prompt_is_computed_in_chunks_and_held_under_its_lease(bench):
    started, *grown, done = bench.run_dry(submit("a", 20))
    assert started == Started(attempt_id="a", queue_s=0.0)
    assert [piece.num_tokens for piece in bench.executor.plans] == [8, 8, 4]
    assert [type(event) for event in grown] == [CacheGrown, CacheGrown]
    assert isinstance(done, PromptDone)
    assert done.first_tokens == (FirstToken(scripted_token(20, 20, 0, 256), None),)
    assert done.num_chunks == 3
    assert len(done.cache.block_ids) == bench.pool.num_used == 5
    assert bench.fences.words[done.cache.slot] == done.cache.generation != 0
    assert bench.core.stats.num_held == 1
    assert bench.core.idle_s > 0


@pytest.mark.parametrize("outcome", [LeaseOutcome.CONSUMED, LeaseOutcome.ABANDONED])
def test_the_end_of_the_lease_frees_the_blocks_once(bench, outcome):
    bench.run_dry(submit("a", 20))
    release = ReleaseLease(lease_id="lease-a", outcome=outcome)
    assert bench.turn(release, release) == [Released(attempt_id="a", outcome=outcome)]
    assert bench.turn(release, Cancel(attempt_id="a"), RenewLease(lease_id="lease-a")) == []
    bench.assert_clean()


def test_a_lease_that_nobody_renews_runs_out_on_the_engines_own_clock(bench):
    bench.run_dry(submit("a", 4))
    bench.clock.advance(LEASE_S - 0.1)
    assert bench.turn(RenewLease(lease_id="lease-a")) == []
    bench.clock.advance(LEASE_S - 0.1)
    assert bench.turn() == []
    bench.clock.advance(0.2)
    assert bench.turn() == [Released(attempt_id="a", outcome=LeaseOutcome.EXPIRED)]
    bench.assert_clean()


def test_a_renewal_that_arrives_during_a_long_step_comes_before_expiry(bench):
    bench.run_dry(submit("a", 4))
    bench.clock.advance(LEASE_S + 1)
    assert bench.turn(RenewLease(lease_id="lease-a")) == []
    assert bench.core.stats.num_held == 1


@pytest.mark.parametrize(("max_tokens", "stop_ids"), [(1, ()), (5, (scripted_token(6, 6, 0, 256),))])
def test_a_first_token_that_is_the_last_leaves_no_lease(bench, max_tokens, stop_ids):
    _, done, released = bench.run_dry(submit("a", 6, max_tokens=max_tokens, stop_ids=stop_ids))
    assert done.first_tokens[0].finish_reason is (FinishReason.LENGTH if max_tokens == 1 else FinishReason.STOP)
    assert done.cache is None
    assert released == Released(attempt_id="a", outcome=None)
    bench.assert_clean()


def test_a_cancel_is_seen_at_the_next_chunk(bench):
    bench.turn(submit("a", 32))
    events = bench.turn(Cancel(attempt_id="a"))
    assert [type(event) for event in events] == [Failed]
    assert isinstance(events[0].error, CancelledError)
    assert len(bench.executor.plans) == 1
    bench.assert_clean()


def test_a_cancel_during_the_last_chunk_does_not_look_like_success(bench):
    events = bench.turn(submit("a", 4), during=([], [Cancel(attempt_id="a")]))
    assert [type(event) for event in events] == [Started, Failed]
    bench.assert_clean()


def test_a_cancel_while_the_cache_is_held_ends_the_lease(bench):
    bench.run_dry(submit("a", 4))
    cancel = Cancel(attempt_id="a")
    assert bench.turn(cancel, cancel) == [Released(attempt_id="a", outcome=LeaseOutcome.ABANDONED)]
    bench.assert_clean()


def test_a_cancel_while_waiting_for_blocks(bench):
    bench.run_dry(submit("a", 4 * NUM_BLOCKS))
    assert bench.turn(submit("b", 4)) == []
    assert bench.core.stats.num_waiting == 1
    assert [type(event) for event in bench.turn(Cancel(attempt_id="b"))] == [Failed]
    bench.turn(Cancel(attempt_id="a"))
    bench.assert_clean()


def test_held_caches_count_as_sequences_and_their_end_lets_the_next_start(bench):
    for name in "abcd":
        bench.run_dry(submit(name, 4))
    assert bench.run_dry(submit("e", 4)) == []
    events = bench.run_dry(ReleaseLease(lease_id="lease-a", outcome=LeaseOutcome.CONSUMED))
    assert [type(event) for event in events] == [Released, Started, PromptDone]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RuntimeError("secret text of a prompt"), InternalError),
        (ResourceExhaustedError("no memory", retry_after_s=1.0), ResourceExhaustedError),
    ],
)
def test_a_step_that_fails_ends_its_attempts_and_no_other(bench, failure, expected):
    bench.run_dry(submit("held", 4))
    bench.turn(submit("a", 32))
    healthy = bench.executor.execute

    def broken(plan, pause):
        raise failure

    bench.executor.execute = broken
    (event,) = bench.turn()
    assert event.attempt_id == "a"
    assert type(event.error) is expected
    assert "secret" not in str(event.error) if expected is InternalError else True
    bench.executor.execute = healthy
    assert [type(event) for event in bench.run_dry(submit("b", 4))] == [Started, PromptDone]
    assert bench.core.stats.num_held == 2


def test_every_command_is_answered_by_a_batch(bench):
    batches = bench.batches(RenewLease(lease_id="nobody")) + bench.batches()
    assert [batch.num_commands for batch in batches] == [1]


def test_a_start_is_told_before_the_step(bench):
    batches = bench.batches(submit("a", 4))
    assert [[type(event) for event in batch.events] for batch in batches] == [[Started], [PromptDone]]
    assert [batch.step is not None for batch in batches] == [False, True]


def test_a_short_prompt_runs_in_the_middle_of_a_long_ones_step(bench):
    before, started, chat, step = bench.batches(submit("long", 40), during=([submit("chat", 8)],))
    assert before.events == (Started(attempt_id="long", queue_s=0.0),)
    assert started.events == (Started(attempt_id="chat", queue_s=0.0),)
    # The chat has its first token before the step that it came into has ended.
    assert [type(event) for event in chat.events] == [PromptDone]
    assert (chat.events[0].first_tokens[0].token_id, chat.step.num_tokens) == (scripted_token(8, 8, 0, 256), 8)
    assert ([type(event) for event in step.events], step.step.num_tokens) == ([CacheGrown], 8)
    assert [[piece.attempt_id for piece in plan.slices] for plan in bench.executor.plans] == [["long"], ["chat"]]
    assert [(event.attempt_id, event.num_chunks) for event in bench.run_dry()[-1:]] == [("long", 5)]


def test_a_prompt_that_is_not_much_shorter_waits_for_the_end_of_the_step(bench):
    events = bench.turn(submit("long", 40), during=([submit("other", 11)],))
    assert [(type(event), event.attempt_id) for event in events] == [
        (Started, "long"),
        (Started, "other"),
        (CacheGrown, "long"),
    ]
    assert len(bench.executor.plans) == 1


def test_those_who_interrupt_leave_the_oldest_its_share(bench):
    chats = [replace(submit(name, 8), token_ids=[ord(name)] * 8) for name in "abcd"]
    # A fourth of all tokens is the oldest's: 24 of others for the 8 of its step. A sequence slot is its own, too.
    bench.turn(submit("long", 40), during=(chats,))
    sizes = [[(piece.attempt_id, len(piece.token_ids)) for piece in plan.slices] for plan in bench.executor.plans]
    assert sizes == [[("long", 8)], [("a", 8)], [("b", 8)], [("c", 8)]]


@pytest.mark.parametrize("is_in_pause", [True, False])
def test_a_cancel_during_a_step_waits_for_its_end_because_blocks_are_written(bench, is_in_pause):
    execute = bench.executor.execute
    used = []

    def watched(plan, pause):
        output = execute(plan, pause)
        used.append(bench.pool.num_used)
        return output

    bench.executor.execute = watched
    cancel = [Cancel(attempt_id="a"), Cancel(attempt_id="a")]
    events = bench.turn(submit("a", 32), during=(cancel, []) if is_in_pause else ([], cancel))
    assert used == [8]
    assert [type(event) for event in events] == [Started, Failed]
    assert isinstance(events[1].error, CancelledError)
    bench.assert_clean()


def test_in_a_pause_leases_end_and_waiting_prompts_start(bench):
    bench.run_dry(submit("held", 4))
    for name in "bcd":
        bench.run_dry(submit(name, 4))
    bench.turn(ReleaseLease(lease_id="lease-b", outcome=LeaseOutcome.CONSUMED), submit("long", 40))
    release = ReleaseLease(lease_id="lease-held", outcome=LeaseOutcome.CONSUMED)
    events = bench.turn(during=([submit("chat", 2), release],))
    assert [(type(event), event.attempt_id) for event in events] == [
        (Released, "held"),
        (Started, "chat"),
        (PromptDone, "chat"),
        (CacheGrown, "long"),
    ]


def test_an_interrupting_step_that_fails_leaves_the_interrupted_one_alone(bench):
    execute = bench.executor.execute

    def broken_for_chats(plan, pause):
        if plan.slices[0].attempt_id == "chat":
            raise ResourceExhaustedError("no memory", retry_after_s=1.0)
        return execute(plan, pause)

    bench.executor.execute = broken_for_chats
    events = bench.turn(submit("long", 12), during=([submit("chat", 2)],))
    assert [(type(event), event.attempt_id) for event in events] == [
        (Started, "long"),
        (Started, "chat"),
        (Failed, "chat"),
        (CacheGrown, "long"),
    ]
    assert [(type(event), event.num_chunks) for event in bench.run_dry()] == [(PromptDone, 2)]


def test_a_structure_may_end_with_the_first_token_or_fail_there(bench):
    events = bench.run_dry(replace(submit("a", 5), structure=regex("1")))
    assert [type(event) for event in events] == [Started, PromptDone, Released]
    assert (events[1].first_tokens[0].finish_reason, events[1].cache) == (FinishReason.STOP, None)
    events = bench.run_dry(replace(submit("b", 5), structure=regex("-1")))
    assert [type(event) for event in events] == [Started, Failed]
    assert isinstance(events[1].error, ResourceExhaustedError)
    (failed,) = bench.run_dry(replace(submit("c", 5), structure=regex("0")))
    assert isinstance(failed.error, InvalidArgumentError)
    bench.assert_clean()


def test_the_prompt_is_scored_chunk_by_chunk(bench):
    options = LogprobOptions(output_top=1, prompt_top=0)
    events = bench.run_dry(replace(submit("a", 19, max_tokens=1), logprobs=options))
    parts = [event for event in events if isinstance(event, PromptScored)]
    assert [(part.first_position, len(part.logprobs)) for part in parts] == [(1, 8), (9, 8), (17, 2)]
    assert [list(plan.slices[0].scored.token_ids) for plan in bench.executor.plans] == [
        list(range(2, 10)),
        list(range(10, 18)),
        [18, 19],
    ]
    (done,) = [event for event in events if isinstance(event, PromptDone)]
    assert done.first_tokens[0].logprobs.top[0][0] == done.first_tokens[0].token_id
    bench.assert_clean()


def test_a_prompt_with_output_of_an_earlier_attempt_counts_that_output(bench):
    resumed = replace(submit("a", 9, max_tokens=4), num_output_tokens=3)
    events = bench.run_dry(resumed)
    done = next(event for event in events if isinstance(event, PromptDone))
    assert (done.first_tokens[0].finish_reason, done.cache) == (FinishReason.LENGTH, None)
    goes_on = next(event for event in bench.run_dry(replace(resumed, attempt_id="b", num_output_tokens=2)))
    assert isinstance(goes_on, Started)
    bench.turn(Cancel(attempt_id="b"))
    bench.assert_clean()


def test_an_earlier_output_counts_for_the_structure(bench):
    resumed = replace(submit("a", 9), num_output_tokens=3, structure=regex("4"))
    done = next(event for event in bench.run_dry(resumed) if isinstance(event, PromptDone))
    assert done.first_tokens[0].finish_reason is FinishReason.STOP
    [failed] = bench.run_dry(replace(resumed, attempt_id="b", structure=regex("3")))
    assert isinstance(failed.error, OutOfRangeError)
    bench.assert_clean()


def cached_tokens(events) -> list[int]:
    return [event.num_cached_tokens for event in events if isinstance(event, PromptDone)]


@pytest.mark.parametrize(("prefix_cache", "expected"), [(True, 16), (False, 0)])
def test_a_prompt_begins_where_another_ones_blocks_end(prefix_cache, expected):
    bench = Bench(prefix_cache=prefix_cache)
    first = bench.run_dry(submit("a", 18))
    # The first is still held: both have the blocks, and each its own last one.
    second = bench.run_dry(submit("b", 18))
    assert (cached_tokens(first), cached_tokens(second)) == ([0], [expected])
    assert second[-1].first_tokens == first[-1].first_tokens
    assert bench.pool.num_used == (6 if prefix_cache else 10)
    assert first[-1].cache.block_ids[-1] != second[-1].cache.block_ids[-1]
    bench.turn(ReleaseLease(lease_id="lease-a", outcome=LeaseOutcome.CONSUMED))
    assert bench.pool.num_used == 5
    bench.turn(ReleaseLease(lease_id="lease-b", outcome=LeaseOutcome.CONSUMED))
    bench.assert_clean()
    assert cached_tokens(bench.run_dry(submit("c", 21))) == [expected]


def test_the_last_token_is_computed_also_where_all_blocks_are_known(bench):
    bench.run_dry(submit("a", 16))
    assert cached_tokens(bench.run_dry(submit("b", 16))) == [12]
    assert bench.executor.plans[-1].num_tokens == 4


def test_tenants_do_not_find_each_others_prompts(bench):
    for attempt_id, salt, expected in (("a", "x", 0), ("b", "y", 0), ("c", "x", 8)):
        assert cached_tokens(bench.run_dry(replace(submit(attempt_id, 10), cache_salt=salt))) == [expected]


def test_a_prompt_that_is_scored_is_computed_whole_and_serves_others(bench):
    bench.run_dry(submit("a", 10))
    scored = replace(submit("b", 14), logprobs=LogprobOptions(prompt_top=0))
    assert cached_tokens(bench.run_dry(scored)) == [0]
    assert cached_tokens(bench.run_dry(submit("c", 14))) == [12]


def test_a_step_that_fails_leaves_nothing_to_be_found(bench):
    bench.turn(submit("a", 20))
    healthy = bench.executor.execute

    def broken(plan):
        raise RuntimeError

    bench.executor.execute = broken
    bench.turn()
    bench.executor.execute = healthy
    # The first step was committed, 8 tokens; the second never.
    assert cached_tokens(bench.run_dry(submit("b", 20))) == [8]


def test_what_a_cancelled_prompt_has_computed_is_not_lost(bench):
    bench.turn(submit("a", 20))
    bench.turn(Cancel(attempt_id="a"))
    assert cached_tokens(bench.run_dry(submit("b", 20))) == [8]


def test_prompts_that_come_together_compute_their_common_beginning_once(bench):
    events = bench.run_dry(submit("a", 30), submit("b", 31))
    assert sum(plan.num_tokens for plan in bench.executor.plans) < 30 + 31 - 16
    assert sorted(cached_tokens(events))[0] < 8 <= sorted(cached_tokens(events))[1]


def test_a_prompt_that_only_fits_beside_the_one_it_shares_with_starts(bench):
    bench.run_dry(submit("a", 4 * (NUM_BLOCKS - 1)))
    events = bench.run_dry(submit("b", 4 * (NUM_BLOCKS - 1) - 2))
    assert cached_tokens(events) == [4 * (NUM_BLOCKS - 2)]
    assert bench.pool.num_free == 0


def test_a_hit_is_short_for_the_scheduler(bench):
    bench.run_dry(submit("a", 40))
    other = replace(submit("c", 20), token_ids=list(range(100, 120)))
    events = bench.run_dry(other, submit("b", 42))
    assert [event.attempt_id for event in events if isinstance(event, PromptDone)] == ["b", "c"]


def grown(events) -> list[tuple[int, ...]]:
    return [event.cache.block_ids for event in events if isinstance(event, CacheGrown)]


def test_a_long_prompts_cache_may_be_read_as_it_is_computed(bench):
    events = bench.run_dry(submit("a", 22))
    kinds = [type(event) for event in events]
    assert kinds == [Started, CacheGrown, CacheGrown, PromptDone]
    assert [len(block_ids) for block_ids in grown(events)] == [2, 4]
    assert [event.is_new for event in events if isinstance(event, CacheGrown)] == [True, False]
    done = events[-1]
    assert len(done.cache.block_ids) == 6
    for block_ids in grown(events):
        assert done.cache.block_ids[: len(block_ids)] == block_ids
    assert {event.cache.generation for event in events[1:]} == {done.cache.generation}
    assert bench.fences.words[done.cache.slot] == done.cache.generation
    # Complete, it must be renewed.
    bench.clock.advance(LEASE_S)
    [released] = bench.turn()
    assert released.outcome is LeaseOutcome.EXPIRED
    bench.assert_clean()


def test_a_growing_lease_does_not_run_out_while_its_prompt_is_computed(bench):
    bench.turn(submit("a", 22))
    bench.clock.advance(10 * LEASE_S)
    events = bench.run_dry()
    assert isinstance(events[-1], PromptDone)
    bench.turn(ReleaseLease(lease_id="lease-a", outcome=LeaseOutcome.CONSUMED))
    bench.assert_clean()


def test_a_reader_that_gives_up_early_gets_nothing_more_and_the_prompt_goes_on(bench):
    bench.turn(submit("a", 22))
    assert any(bench.fences.words)
    assert bench.turn(ReleaseLease(lease_id="lease-a", outcome=LeaseOutcome.ABANDONED)) == []
    assert not any(bench.fences.words)
    events = bench.run_dry()
    assert [type(event) for event in events] == [PromptDone, Released]
    assert events[-1].outcome is LeaseOutcome.ABANDONED
    bench.assert_clean()


@pytest.mark.parametrize("during_step", [False, True])
def test_a_cancel_while_the_cache_grows_ends_its_lease(bench, during_step):
    bench.turn(submit("a", 22))
    cancel = Cancel(attempt_id="a")
    events = bench.turn(during=([], [cancel])) if during_step else bench.turn(cancel)
    assert isinstance(events[-1], Failed)
    assert bench.run_dry() == []
    bench.assert_clean()


def test_no_cache_grows_for_a_prompt_whose_first_token_is_the_last(bench):
    assert grown(bench.run_dry(submit("a", 22, max_tokens=1))) == []
    bench.assert_clean()


def test_a_grown_cache_ends_with_a_first_token_that_stops(bench):
    token_id = bench.run_dry(submit("a", 22))[-1].first_tokens[0].token_id
    bench.turn(Cancel(attempt_id="a"))
    events = bench.run_dry(replace(submit("b", 22, stop_ids=[token_id]), token_ids=[*range(30, 51), 22]))
    assert [type(event) for event in events[-2:]] == [PromptDone, Released]
    assert events[-2].cache is None
    bench.assert_clean()


def test_a_step_that_fails_ends_the_lease_of_a_grown_cache(bench):
    bench.turn(submit("a", 22))
    bench.executor.execute = None
    events = bench.turn()
    assert isinstance(events[-1], Failed)
    bench.assert_clean()
