"""What the loop does with steps that fail, on a core that only remembers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from baton.core.clock import ManualClock
from baton.core.errors import EngineFaultError, InternalError, OutOfMemoryError, ServingError, UnavailableError
from baton.core.generation import SamplingParams
from baton.core.model import KVLayout
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.executor import ScriptedExecutor
from baton.telemetry.instruments import WorkerInstruments
from baton.worker.engine_loop import MAX_FAULTS, EngineLoop, EngineStats, EventBatch
from baton.worker.metrics import LoadMetrics

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")
NUM_BLOCKS = 64


@dataclass
class Ended:
    attempt_id: str
    error: ServingError | None = None
    is_last: bool = True


@dataclass
class Core:
    """Wants one plan computed."""

    wanted: BatchPlan
    events: list[Ended] = field(default_factory=list)
    idle_s: float | None = None
    stats: EngineStats = field(default_factory=EngineStats)

    def handle(self, command):
        raise AssertionError("no commands here")

    def plan(self):
        return self.wanted

    def commit(self, plan, output):
        assert len(plan.slices) == len(output.tokens)
        self.events += [Ended(piece.attempt_id) for piece in plan.slices]

    def fail(self, plan, error):
        self.events += [Ended(piece.attempt_id, error) for piece in plan.slices]

    def take_events(self):
        events, self.events = tuple(self.events), []
        return events

    def check_integrity(self):
        pass


class TightExecutor(ScriptedExecutor):
    """Has memory for so many tokens and keys in a step."""

    def __init__(self, *, max_tokens: int, max_keys: int = 1000) -> None:
        super().__init__(layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self.max_tokens, self.max_keys = max_tokens, max_keys

    def execute(self, plan, pause=None):
        if plan.num_tokens > self.max_tokens or sum(piece.end_position for piece in plan.slices) > self.max_keys:
            raise OutOfMemoryError("too large", retry_after_s=None)
        return super().execute(plan)


def piece(attempt_id: str, num_tokens: int, start: int = 0, first_block: int = 0) -> SequenceSlice:
    num_blocks = LAYOUT.blocks_for(start + num_tokens)
    return SequenceSlice(
        attempt_id=attempt_id,
        token_ids=[1] * num_tokens,
        start_position=start,
        block_table=list(range(first_block, first_block + num_blocks)),
        sampling=SamplingParams(temperature=0.0),
    )


def run(executor, *pieces) -> list[EventBatch]:
    batches: list[EventBatch] = []
    EngineLoop(Core(BatchPlan(slices=pieces)), executor, ManualClock()).turn([], list, batches.append)
    return batches


def outcome(batches) -> dict[str, str]:
    events = [event for batch in batches for event in batch.events]
    return {event.attempt_id: "" if event.error is None else event.error.reason for event in events}


PROMPTS = (piece("a", 4, first_block=0), piece("b", 8, first_block=8), piece("c", 6, first_block=16))


@pytest.mark.parametrize(
    ("max_tokens", "shed"), [(18, set()), (17, {"b"}), (10, {"b"}), (9, {"b", "c"}), (4, {"b", "c"})]
)
def test_out_of_memory_sheds_the_largest_slices_and_as_few_as_it_takes(max_tokens, shed):
    executor = TightExecutor(max_tokens=max_tokens)
    batches = run(executor, *PROMPTS)
    assert outcome(batches) == {name: "OUT_OF_MEMORY" if name in shed else "" for name in "abc"}
    assert [len(plan.slices) for plan in executor.plans] == [3 - len(shed)]
    errors = [event.error for batch in batches for event in batch.events if event.error]
    assert [error.retry_after_s for error in errors] == [1.0] * len(shed)


def test_of_equal_slices_the_one_of_the_longest_sequence_is_shed():
    batches = run(TightExecutor(max_tokens=9, max_keys=30), piece("old", 1, 20), piece("new", 1, 15, 10))
    assert outcome(batches) == {"old": "OUT_OF_MEMORY", "new": ""}


def test_one_that_does_not_fit_alone_is_not_told_to_retry():
    (batch,) = run(TightExecutor(max_tokens=7), piece("b", 8))
    assert batch.events[0].error.retry_after_s is None
    assert batch.step is not None


@pytest.mark.parametrize(
    ("failure", "reason"), [(UnavailableError("away"), "UNAVAILABLE"), (ZeroDivisionError(), "INTERNAL")]
)
def test_any_other_failure_ends_the_whole_step(failure, reason):
    class Broken(ScriptedExecutor):
        def execute(self, plan, pause=None):
            raise failure

    batches = run(Broken(layout=LAYOUT, num_blocks=NUM_BLOCKS), *PROMPTS)
    assert outcome(batches) == dict.fromkeys("abc", reason)


def test_a_failure_after_a_shed_request_ends_the_rest_by_its_own_reason():
    class Breaking(TightExecutor):
        def execute(self, plan, pause=None):
            if len(plan.slices) == 2:
                raise UnavailableError("away")
            return super().execute(plan)

    batches = run(Breaking(max_tokens=17), *PROMPTS)
    assert outcome(batches) == {"b": "OUT_OF_MEMORY", "a": "UNAVAILABLE", "c": "UNAVAILABLE"}


def test_shed_requests_are_counted():
    registry = CollectorRegistry()
    metrics = LoadMetrics(WorkerInstruments(registry), NUM_BLOCKS)
    for batch in run(TightExecutor(max_tokens=9), *PROMPTS):
        metrics.observe(batch)
    assert registry.get_sample_value("baton_out_of_memory_total") == 2


class Scripted(ScriptedExecutor):
    """Steps that end as listed: by an error, or well where there is None."""

    def __init__(self, ends) -> None:
        super().__init__(layout=LAYOUT, num_blocks=NUM_BLOCKS)
        self.ends = list(ends)

    def execute(self, plan, pause=None):
        if (error := self.ends.pop(0)) is not None:
            raise error
        return super().execute(plan)


def num_steps_until_the_end(*ends) -> int | None:
    """None when the loop goes on after all of them. Whoever was in a step is told its outcome in any case."""
    loop = EngineLoop(Core(BatchPlan(slices=PROMPTS)), Scripted(ends), ManualClock())
    for index in range(len(ends)):
        batches: list[EventBatch] = []
        try:
            loop.turn([], list, batches.append)
        except EngineFaultError:
            return index + 1
        finally:
            assert outcome(batches).keys() == set("abc")
    return None


def test_an_executor_that_is_lost_in_a_step_ends_the_engine():
    class Lost(ScriptedExecutor):
        def execute(self, plan, pause=None):
            raise EngineFaultError("rank 1 of 2 was killed by SIGKILL")

    with pytest.raises(EngineFaultError, match="rank 1"):
        run(Lost(layout=LAYOUT, num_blocks=NUM_BLOCKS), piece("a", 3))


def test_an_engine_whose_steps_all_fail_ends():
    broken = [ZeroDivisionError(), InternalError("no numbers")] * MAX_FAULTS
    assert num_steps_until_the_end(*broken) == MAX_FAULTS


def test_a_success_in_between_starts_the_count_again():
    assert num_steps_until_the_end(*[*[ZeroDivisionError()] * (MAX_FAULTS - 1), None] * 3) is None


def test_failures_that_are_not_its_own_fault_do_not_end_an_engine():
    assert num_steps_until_the_end(*[UnavailableError("away")] * 9) is None
    assert num_steps_until_the_end(*[OutOfMemoryError("too large", retry_after_s=None)] * 3) is None
