from __future__ import annotations

from dataclasses import replace

import pytest

from baton.core.clock import ManualClock
from baton.core.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ServingError,
)
from baton.core.generation import FinishReason, SamplingParams, StopRule, Structure, StructureKind
from baton.core.model import KVLayout
from baton.engine.block_pool import BlockPool
from baton.engine.executor import ScriptedExecutor, scripted_token
from baton.worker.engine_loop import EngineLoop
from baton.worker.messages import Cancel, Failed
from decode_worker.engine_core import DecodeCore
from decode_worker.messages import Accept, Finished, ForgetPeer, Grow, HandedOver, OpenPeer, Park, Resume, Token
from decode_worker.movers import CopyDone, Rooms
from kv_transfer.descriptor import Growth, KVDescriptor, PeerKey, PeerPool, ShmHandle
from kv_transfer.errors import StaleLeaseError
from kv_transfer.transport import ReadResult

GREEDY = SamplingParams(temperature=0.0)
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 16


class HandCopier:
    """A copier whose copies end when the test says so."""

    def __init__(self) -> None:
        self.started: dict[str, list[int]] = {}
        self.parts: list[tuple[int, tuple[int, ...]]] = []
        self.peers: list[object] = []
        self._done: list[CopyDone] = []

    def open_peer(self, pool):
        self.peers.append(pool)

    def forget_peer(self, peer):
        self.peers = [pool for pool in self.peers if pool.peer != peer]

    def start(self, attempt_id, kv, block_ids):
        assert len(kv.block_ids) == len(block_ids)
        assert attempt_id not in self.started, "one part at a time"
        self.started[attempt_id] = list(block_ids)
        self.parts.append((kv.first_block, kv.block_ids))

    def finish(self, attempt_id: str, error: ServingError | None = None):
        del self.started[attempt_id]
        result = error or ReadResult(transport="shm", num_bytes=64, copy_s=0.25)
        self._done.append(CopyDone(attempt_id=attempt_id, result=result))

    @property
    def has_done(self):
        return bool(self._done)

    def take_done(self):
        done, self._done = self._done, []
        return done


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
    """A decode engine without processes: commands are given and turns are taken by hand."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.copier = HandCopier()
        self.executor = ScriptedExecutor(layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self.copies: list[tuple[int, int]] = []
        self.core = DecodeCore(Rooms(pool=self.pool, copy_blocks=self.copied), 3, self.copier, self.clock, Structures())
        self.loop = EngineLoop(self.core, self.executor, self.clock)

    def copied(self, source_ids, block_ids):
        self.copies += zip(source_ids, block_ids, strict=True)

    def turn(self, *commands, after_step=()):
        batches = []
        self.loop.turn(list(commands), lambda: list(after_step), batches.append)
        return [event for batch in batches for event in batch.events]

    def run_dry(self):
        events = []
        while self.core.idle_s == 0:
            events += self.turn()
        return events

    def join(self, command):
        self.turn(command)
        self.copier.finish(command.attempt_id)
        return self.turn()


@pytest.fixture
def bench():
    return Bench()


def accept(attempt_id: str, *, num_tokens: int = 6, max_tokens: int = 4, stop_ids=()) -> Accept:
    return Accept(
        attempt_id=attempt_id,
        kv=KVDescriptor(
            lease_id=f"lease-{attempt_id}",
            lease_slot=0,
            generation=1,
            worker_id="p",
            incarnation="i",
            address="127.0.0.1:1",
            block_ids=tuple(range(LAYOUT.blocks_for(num_tokens))),
            num_tokens=num_tokens,
            lease_s=5.0,
        ),
        first_token_ids=(9,),
        source_block_size=LAYOUT.block_size,
        sampling=GREEDY,
        stop=StopRule(max_tokens=max_tokens, stop_token_ids=frozenset(stop_ids)),
    )


def test_a_sequence_runs_from_its_handover_to_its_last_token(bench):
    bench.turn(accept("a"))
    assert bench.executor.plans == []
    assert bench.core.idle_s is None
    bench.clock.advance(1.0)
    bench.copier.finish("a")
    events = bench.turn() + bench.run_dry()
    expected, token = [], 9
    for position in (7, 8, 9):
        token = scripted_token(token, position, 0, 256)
        reason = FinishReason.LENGTH if position == 9 else None
        expected.append(Token(attempt_id="a", position=position, token_id=token, finish_reason=reason))
    assert events[0] == HandedOver(attempt_id="a", transport="shm", num_bytes=64, wait_s=0.0, copy_s=0.25, num_parts=1)
    assert events[1:-1] == expected
    assert events[-1] == Finished(attempt_id="a", reason=FinishReason.LENGTH, num_steps=3, generate_s=0.0)
    bench.core.check_integrity()


def test_a_copy_that_ended_during_the_last_step_is_not_slept_through(bench):
    # Its wake was taken together with the commands after that step: the core must not let the loop sleep.
    bench.turn(accept("a"))
    bench.copier.finish("a")
    assert bench.core.idle_s == 0.0
    assert [type(event).__name__ for event in bench.run_dry()][-1] == "Finished"
    assert bench.core.idle_s is None


def test_a_stop_token_is_produced_and_ends_the_sequence(bench):
    stop = scripted_token(9, 7, 0, 256)
    events = bench.join(accept("a", stop_ids=[stop]))
    assert [type(event) for event in events] == [HandedOver, Token, Finished]
    assert (events[1].token_id, events[2].reason) == (stop, FinishReason.STOP)
    bench.core.check_integrity()


def test_running_sequences_step_while_another_is_copied(bench):
    bench.join(accept("a", max_tokens=20))
    bench.turn(accept("b"))
    assert [type(event) for event in bench.turn()] == [Token]
    bench.copier.finish("b")
    assert [event.attempt_id for event in bench.turn() if isinstance(event, Token)] == ["a", "b"]


def test_the_wait_for_room_is_measured_and_ends_with_somebody_elses_last_token(bench):
    bench.turn(accept("big", num_tokens=56, max_tokens=8))
    bench.turn(accept("next", num_tokens=8, max_tokens=8))
    assert list(bench.copier.started) == ["big"]
    bench.clock.advance(2.0)
    bench.turn(Cancel(attempt_id="big"))
    bench.copier.finish("big")
    assert [type(event) for event in bench.turn()] == [Failed]
    assert list(bench.copier.started) == ["next"]
    bench.copier.finish("next")
    assert bench.turn()[0].wait_s == 2.0


@pytest.mark.parametrize("phase", ["waiting", "copying", "running", "last step"])
def test_a_cancel_frees_the_blocks_when_nothing_writes_to_them(bench, phase):
    cancel = Cancel(attempt_id="a")
    if phase == "waiting":
        bench.turn(accept("big", num_tokens=60, max_tokens=4))
        bench.turn(accept("a"))
        events = bench.turn(cancel)
        bench.copier.finish("big", StaleLeaseError("gone"))
        bench.turn()
    elif phase == "copying":
        bench.turn(accept("a"))
        assert bench.turn(cancel, cancel) == []
        assert bench.pool.num_used == 2
        bench.copier.finish("a")
        events = bench.turn()
    elif phase == "running":
        bench.join(accept("a"))
        events = bench.turn(cancel)
    else:
        bench.turn(accept("a", max_tokens=2))
        bench.copier.finish("a")
        events = bench.turn(after_step=[cancel])[1:]
    (event,) = events
    assert isinstance(event, Failed)
    assert isinstance(event.error, CancelledError)
    assert bench.turn(cancel) == []
    bench.core.check_integrity()


def test_a_stale_lease_fails_its_sequence_only(bench):
    bench.join(accept("a", max_tokens=20))
    bench.turn(accept("b"))
    bench.copier.finish("b", StaleLeaseError("the lease ended"))
    failed, token = bench.turn()
    assert isinstance(failed.error, StaleLeaseError)
    assert (failed.attempt_id, token.attempt_id) == ("b", "a")


def test_a_step_that_fails_ends_its_sequences_and_no_other(bench):
    bench.join(accept("a", max_tokens=20))
    bench.turn(accept("b"))
    healthy, bench.executor.execute = bench.executor.execute, None  # not callable: any exception will do
    (event,) = bench.turn()
    assert event.attempt_id == "a"
    assert type(event.error) is InternalError
    bench.executor.execute = healthy
    bench.copier.finish("b")
    assert [type(event) for event in bench.turn() + bench.run_dry()][-1] is Finished
    bench.core.check_integrity()


def test_peers_are_opened_and_forgotten(bench):
    handle = ShmHandle(segment="baton-x", num_blocks=4)
    pool = PeerPool(peer=PeerKey("p", "i"), layout=LAYOUT, address="", secret=b"", handles=(handle,))
    bench.turn(OpenPeer(pool=pool))
    assert bench.copier.peers == [pool]
    bench.turn(ForgetPeer(peer=pool.peer))
    assert bench.copier.peers == []


def test_a_parked_sequence_keeps_its_slot_and_blocks_and_goes_on_where_it_was(bench):
    whole = Bench()
    expected = whole.join(accept("a", max_tokens=8)) + whole.run_dry()
    events = bench.join(accept("a", max_tokens=8)) + bench.turn(accept("b", max_tokens=12))
    bench.copier.finish("b")
    events += bench.turn()
    used = bench.pool.num_used + 1  # b grows
    # A step that runs when the command comes counts; the next one goes without it.
    events += bench.turn(after_step=[Park(attempt_id="a"), Park(attempt_id="a")])
    assert {event.attempt_id for event in bench.turn()} == {"b"}
    assert (bench.core.stats.num_held, bench.core.stats.num_running, bench.pool.num_used) == (1, 1, used)
    bench.turn(accept("c"))
    bench.turn(accept("d"))
    assert list(bench.copier.started) == ["c"]  # three slots
    bench.turn(Cancel(attempt_id="b"), Cancel(attempt_id="d"))
    assert bench.core.idle_s is None
    events += bench.turn(Resume(attempt_id="a")) + bench.run_dry()
    assert [event for event in events if event.attempt_id == "a"] == expected
    bench.copier.finish("c")
    bench.turn(Park(attempt_id="c"), Cancel(attempt_id="c"))
    bench.core.check_integrity()


def test_an_engine_whose_seats_are_all_parked_is_not_taken_for_stuck(bench):
    for name in "abc":
        bench.join(accept(name, max_tokens=8))
    bench.turn(accept("waits"), after_step=[Park(attempt_id=name) for name in "abc"])
    batches = []
    bench.loop.turn([], list, batches.append)  # nobody has asked, and yet it is told that there is nothing to do
    assert [batch.stats.has_work for batch in batches] == [False]
    assert (batches[0].stats.num_waiting, batches[0].stats.num_held) == (1, 3)
    assert not batches[0].stats.is_idle
    bench.turn(Cancel(attempt_id="a"))
    assert bench.core.stats.has_work  # a copy is under way
    assert list(bench.copier.started) == ["waits"]
    bench.copier.finish("waits")
    bench.run_dry()
    bench.turn(Cancel(attempt_id="b"), Cancel(attempt_id="c"))
    bench.core.check_integrity()


def test_only_parked_sequences_are_no_work_and_a_cancel_frees_them(bench):
    bench.join(accept("a", max_tokens=8))
    bench.turn(Park(attempt_id="a"))
    assert bench.core.idle_s is None
    assert not bench.core.stats.has_work
    assert not bench.core.stats.is_idle
    (event,) = bench.turn(Cancel(attempt_id="a"))
    assert isinstance(event, Failed)
    bench.turn(Resume(attempt_id="a"), Park(attempt_id="a"))
    bench.core.check_integrity()


def test_a_structure_goes_on_where_the_first_token_left_it_and_ends_the_sequence(bench):
    events = bench.join(replace(accept("a", max_tokens=9), structure=regex("3"))) + bench.run_dry()
    assert [type(event) for event in events] == [HandedOver, Token, Token, Finished]
    assert events[-1].reason is FinishReason.STOP
    bench.core.check_integrity()


def test_a_structure_that_cannot_be_followed_fails_its_sequence_alone(bench):
    bench.join(accept("other"))
    events = bench.join(replace(accept("a"), structure=regex("-3"))) + bench.run_dry()
    mine = [event for event in events if event.attempt_id == "a"]
    assert [type(event) for event in mine] == [HandedOver, Token, Token, Failed]
    assert isinstance(mine[-1].error, ResourceExhaustedError)
    assert [type(event) for event in events if event.attempt_id == "other"][-1] is Finished
    for text, error in (("-1", ResourceExhaustedError), ("0", InvalidArgumentError)):
        (failed,) = bench.join(replace(accept("b"), structure=regex(text)))
        assert isinstance(failed.error, error)
    bench.core.check_integrity()


def test_rules_and_log_probabilities_follow_a_sequence(bench):
    sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    command = replace(accept("a"), sampling=sampling, prompt_ids=(1, 2), top_logprobs=2)
    events = bench.join(command)
    rules = bench.executor.plans[-1].slices[0].rules
    assert list(rules.seen_ids) == [1, 2, 9, events[1].token_id]
    assert events[1].logprobs.top[0][0] == events[1].token_id
    bench.run_dry()


def test_a_sequence_goes_on_from_the_output_of_an_earlier_attempt(bench):
    whole = bench.join(accept("a", num_tokens=6, max_tokens=8)) + bench.run_dry()
    tokens = [event.token_id for event in whole if isinstance(event, Token)]
    # The cache has the prompt's 6 positions, the first token and two more; the next one is the new attempt's first.
    resumed = replace(
        accept("b", num_tokens=9, max_tokens=8),
        output_ids=(9, *tokens[:2]),
        first_token_ids=(tokens[2],),
        prompt_ids=(),
    )
    rest = bench.join(resumed) + bench.run_dry()
    assert [(event.position, event.token_id) for event in rest if isinstance(event, Token)] == [
        (10 + index, token_id) for index, token_id in enumerate(tokens[3:])
    ]
    assert rest[-1].reason is FinishReason.LENGTH
    bench.core.check_integrity()


def test_an_earlier_output_counts_for_the_structure(bench):
    resumed = replace(accept("a", num_tokens=9, max_tokens=8), output_ids=(1, 2), structure=regex("4"))
    events = bench.join(resumed) + bench.run_dry()
    assert len([event for event in events if isinstance(event, Token)]) == 1
    assert events[-1].reason is FinishReason.STOP
    [failed] = bench.join(replace(resumed, attempt_id="b", structure=regex("3")))
    assert isinstance(failed.error, InvalidArgumentError)
    bench.core.check_integrity()


def growing(attempt_id: str, *, num_tokens: int = 11, max_tokens: int = 4) -> Accept:
    command = accept(attempt_id, num_tokens=num_tokens, max_tokens=max_tokens)
    return replace(command, kv=replace(command.kv, block_ids=(), is_growing=True), first_token_ids=())


def grow(attempt_id: str, *block_ids: int, first_token_ids: tuple[int, ...] = ()) -> Grow:
    return Grow(attempt_id=attempt_id, growth=Growth(block_ids, first_token_ids))


def test_a_growing_cache_is_copied_as_it_grows(bench):
    assert bench.turn(growing("a")) == []
    assert bench.copier.parts == []
    stats = bench.core.stats
    # Nobody is to take an engine for stuck that waits for its source.
    assert (stats.has_work, stats.num_held, stats.num_used_blocks > 0) == (False, 1, True)
    bench.turn(grow("a", 20, 21))
    assert bench.copier.parts == [(0, (20, 21))]
    assert bench.core.stats.has_work
    first_blocks = bench.copier.started["a"]
    # More comes before that part is here: one part at a time.
    bench.turn(grow("a", 22, first_token_ids=(9,)))
    assert len(bench.copier.parts) == 1
    bench.copier.finish("a")
    assert bench.core.idle_s == 0
    bench.turn()
    assert bench.copier.parts[1:] == [(2, (22,))]
    assert not set(first_blocks) & set(bench.copier.started["a"])
    bench.copier.finish("a")
    events = bench.turn() + bench.run_dry()
    assert events[0] == HandedOver(attempt_id="a", transport="shm", num_bytes=128, wait_s=0.0, copy_s=0.5, num_parts=2)
    tokens = [event.token_id for event in events if isinstance(event, Token)]
    known = bench.join(accept("b", num_tokens=11)) + bench.run_dry()
    assert tokens == [event.token_id for event in known if isinstance(event, Token)]
    bench.core.check_integrity()


def test_the_first_token_may_come_after_the_last_block(bench):
    bench.turn(growing("a", num_tokens=8))
    bench.turn(grow("a", 1, 2))
    bench.copier.finish("a")
    assert bench.turn() == []
    assert bench.core.idle_s is None
    events = bench.turn(grow("a", first_token_ids=(9,)))
    assert isinstance(events[0], HandedOver)


def test_growth_that_is_told_during_the_last_step_of_others_is_not_slept_through(bench):
    bench.turn(accept("other", max_tokens=2))
    bench.turn(growing("a"))
    bench.copier.finish("other")
    events = bench.turn(after_step=[grow("a", 20, 21)])
    assert isinstance(events[-1], Finished)
    assert bench.core.idle_s == 0
    bench.turn()
    assert bench.copier.started["a"]


@pytest.mark.parametrize("is_copying", [False, True])
def test_a_growing_cache_that_is_not_wanted_any_more(bench, is_copying):
    bench.turn(growing("a"))
    bench.turn(grow("a", 20))
    if not is_copying:
        bench.copier.finish("a")
        bench.turn()
    events = bench.turn(Cancel(attempt_id="a"))
    if is_copying:
        assert events == []
        bench.turn(grow("a", 21))
        bench.copier.finish("a")
        events = bench.turn()
    [failed] = events
    assert isinstance(failed.error, CancelledError)
    bench.turn(grow("a", 22, first_token_ids=(9,)), Cancel(attempt_id="a"))
    bench.core.check_integrity()


def test_a_part_that_fails_ends_its_attempt(bench):
    bench.turn(growing("a"))
    bench.turn(grow("a", 20))
    bench.copier.finish("a", StaleLeaseError("ended"))
    [failed] = bench.turn()
    assert isinstance(failed.error, StaleLeaseError)
    bench.core.check_integrity()


def test_a_growing_cache_without_room_waits_and_is_then_copied_whole(bench):
    bench.join(accept("hog", num_tokens=56, max_tokens=4))
    bench.turn(growing("a", num_tokens=7))
    bench.turn(grow("a", 1), grow("a", 2, first_token_ids=(9,)))
    assert bench.copier.parts[1:] == []
    bench.turn(Cancel(attempt_id="hog"))
    assert bench.copier.parts[1:] == [(0, (1, 2))]


def test_a_structure_that_the_first_token_breaks_ends_the_attempt(bench):
    bench.turn(replace(growing("a", num_tokens=4), structure=regex("-1")))
    bench.turn(grow("a", 1, first_token_ids=(9,)))
    bench.copier.finish("a")
    [failed] = bench.turn()
    assert isinstance(failed.error, ResourceExhaustedError)
    bench.core.check_integrity()
