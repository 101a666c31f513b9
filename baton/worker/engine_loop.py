"""The loop of a worker's engine process: commands in, one step, one batch of events out.

What to compute and what the outcome means is an `EngineCore`'s business, a state machine without I/O. What the
loop guarantees:

- Commands are applied before each step, and again after it before its outputs are: an attempt that was
  cancelled during its last step never looks like a success.
- Every step, and every command where no step follows it, is answered by a batch, so that the server process can
  tell busy from stuck.
- A step that fails takes down only the attempts that it computed. One that does not fit into memory takes down one:
  the slice of the most tokens, or of the longest sequence among equals, is shed, and the rest is tried again.
- In the pauses of a step, where the core allows it, commands are applied and steps run that cannot wait for its
  end. They are committed and told before it is.
- After several steps in a row that failed by a fault of ours the loop ends, and so the process: a worker whose every
  step fails would look free and draw all requests to it.
- Time passes for leases also when nobody sends anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from baton.core.errors import EngineFaultError, InternalError, OutOfMemoryError, ServingError
from baton.engine.batch import BatchPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.core.clock import Clock
    from baton.engine.batch import SequenceSlice, StepOutput
    from baton.engine.channel import ChildChannel
    from baton.engine.executor import Executor

_log = logging.getLogger(__name__)

# One bad request may be the cause of a failure; this many steps in a row with no success between are the engine's.
MAX_FAULTS = 3

Receive: TypeAlias = "Callable[[], list[Any]]"
Emit: TypeAlias = "Callable[[EventBatch], None]"


@dataclass(frozen=True, slots=True)
class Preemptions:
    """What an engine did for want of blocks, in all its life, and how many sequences are swapped out now."""

    num_swapped: int = 0
    num_shed: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    num_away: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What an engine holds after a step.

    `num_held` counts attempts whose blocks wait for another worker or a reader: there is nothing to be done for them.
    `is_blocked`: nor is there for any other, until those let go of what they hold.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_held: int = 0
    num_used_blocks: int = 0
    is_blocked: bool = False
    preemptions: Preemptions = Preemptions()

    @property
    def has_work(self) -> bool:
        """Whether the engine should be making progress."""
        return self.num_waiting + self.num_running > 0 and not self.is_blocked

    @property
    def is_idle(self) -> bool:
        """Whether there is no attempt at all: every block must be free."""
        return self.num_waiting + self.num_running + self.num_held == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One step: its sequences, its tokens and how long the computation took."""

    num_seqs: int
    num_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """What the engine tells at one time. `num_commands` counts those it has applied in its life."""

    events: tuple[Any, ...]
    num_commands: int
    stats: EngineStats
    step: StepStats | None


class EngineCore(Protocol):
    """Decides what an engine computes and keeps its books. No call blocks; used from one thread."""

    def handle(self, command: Any) -> None:
        """Applies a command."""
        ...

    def plan(self) -> BatchPlan:
        """Lets time pass, takes work in, and returns the next step; without slices when there is none."""
        ...

    def commit(self, plan: BatchPlan, output: StepOutput) -> None:
        """Takes a step for done. Attempts that ended since `plan` are passed over."""
        ...

    def fail(self, plan: BatchPlan, error: ServingError) -> None:
        """Ends the attempts of a step that failed."""
        ...

    def take_events(self) -> tuple[Any, ...]:
        """What happened since the last call."""
        ...

    @property
    def idle_s(self) -> float | None:
        """How long the engine may sleep: 0 when there is a step to run, None until the next command."""
        ...

    @property
    def stats(self) -> EngineStats:
        """What it holds now."""
        ...

    def check_integrity(self) -> None:
        """AssertionError unless its books add up to nothing held. Called when it is idle."""
        ...


class Interrupts(Protocol):
    """The part of a core whose steps may be interrupted: its `handle` is allowed while a step is computed."""

    def plan_interrupt(self, step: BatchPlan) -> BatchPlan:
        """What is to run in the middle of `step`, to be committed before it; without slices when there is nothing."""
        ...


class EngineLoop:
    """Runs a core and an executor over the channel to the server process.

    With `interrupts`, which is the core again, steps have pauses.
    """

    def __init__(
        self, core: EngineCore, executor: Executor, clock: Clock, *, interrupts: Interrupts | None = None
    ) -> None:
        self._core = core
        self._executor = executor
        self._clock = clock
        self._interrupts = interrupts
        self._num_commands = 0
        self._was_at_work = False  # by the last batch
        self._faults: list[InternalError] = []  # of the steps since one that chose a token

    def run(self, channel: ChildChannel[Any, EventBatch]) -> None:
        """Runs until the server process says stop or is no more. Wakes for commands, `channel.wake` and time.

        EngineFaultError when `MAX_FAULTS` steps in a row have failed, after everybody was told, or when the executor
        can't go on.
        """
        while not channel.is_stopping:
            idle_s = self._core.idle_s
            if idle_s != 0:
                self._executor.rest()
            commands = channel.poll_commands(idle_s)
            self._executor.check()
            self.turn(commands, lambda: channel.poll_commands(0), lambda batch: channel.emit([batch]))

    def turn(self, commands: list[Any], receive: Receive, emit: Emit) -> None:
        """One turn: `commands`, a step if there is one, what `receive` gives meanwhile, and the outcome to `emit`.

        What happened before a step is told before it, so nobody learns of it a step late. EngineFaultError as in `run`.
        """
        plan = self._plan(commands, self._core.plan, emit)
        if not plan.slices:
            return
        pause = None
        if self._interrupts is not None:
            interrupts = self._interrupts
            pause = _Pause(lambda: self._interrupt(plan, interrupts, receive, emit), self._clock)
        self._step(plan, receive, emit, pause)
        if len(self._faults) >= MAX_FAULTS:
            raise EngineFaultError(f"{len(self._faults)} steps in a row failed, the last one: {self._faults[-1]}")

    def _interrupt(self, step: BatchPlan, interrupts: Interrupts, receive: Receive, emit: Emit) -> None:
        """Applies what came and runs what cannot wait for the end of `step`."""
        plan = self._plan(receive(), lambda: interrupts.plan_interrupt(step), emit)
        while plan.slices:
            self._step(plan, receive, emit, None)
            plan = self._plan([], lambda: interrupts.plan_interrupt(step), emit)

    def _plan(self, commands: list[Any], plan: Callable[[], BatchPlan], emit: Emit) -> BatchPlan:
        """Applies `commands`, plans, and tells what happened.

        A batch without events is an answer to commands, or says that there is nothing to do any more.
        """
        self._apply(commands)
        step = plan()
        events = self._core.take_events()
        if events or (not step.slices and (commands or self._core.stats.has_work != self._was_at_work)):
            emit(self._batch(events, None))
        return step

    def _batch(self, events: tuple[Any, ...], step: StepStats | None) -> EventBatch:
        stats = self._core.stats
        self._was_at_work = stats.has_work
        if stats.is_idle:
            self._core.check_integrity()
        return EventBatch(events=events, num_commands=self._num_commands, stats=stats, step=step)

    def _apply(self, commands: list[Any]) -> None:
        for command in commands:
            self._core.handle(command)
            self._num_commands += 1

    def _step(self, plan: BatchPlan, receive: Receive, emit: Emit, pause: _Pause | None) -> None:
        start_s = self._clock.monotonic_s()
        shed: list[tuple[BatchPlan, ServingError]] = []
        output: StepOutput | None = None
        rest = plan
        while rest.slices and output is None:
            try:
                output = self._executor.execute(rest, pause)
            except OutOfMemoryError as error:
                first, rest = _without_largest(rest)
                shed.append((first, _shed_error(error, is_alone=not rest.slices)))
            except EngineFaultError:
                raise
            except ServingError as error:
                shed.append((rest, error))
                break
            except Exception:
                # The pipe carries the generic text only: a traceback may quote a prompt.
                _log.exception("a step failed")
                shed.append((rest, InternalError("the computation of a step failed")))
                break
        step_s = self._clock.monotonic_s() - start_s - (pause.total_s if pause is not None else 0.0)
        if output is not None and any(token is not None for token in output.tokens):
            self._faults.clear()  # damaged weights show where a token is chosen, not before
        self._faults += [error for _, error in shed if isinstance(error, InternalError)]
        self._apply(receive())
        if output is not None:
            self._core.commit(rest, output)
        for failed, why in shed:
            self._core.fail(failed, why)
        step = StepStats(num_seqs=len(plan.slices), num_tokens=plan.num_tokens, step_s=step_s)
        emit(self._batch(self._core.take_events(), step))


def _without_largest(plan: BatchPlan) -> tuple[BatchPlan, BatchPlan]:
    """The slice that takes the most memory, and the others in their order."""
    largest = max(plan.slices, key=_memory_rank)
    return BatchPlan(slices=(largest,)), BatchPlan(slices=tuple(each for each in plan.slices if each is not largest))


def _memory_rank(piece: SequenceSlice) -> tuple[int, int]:
    return len(piece.token_ids), piece.end_position


def _shed_error(error: OutOfMemoryError, *, is_alone: bool) -> OutOfMemoryError:
    """For the one that is shed: a retry can succeed where it shared the memory with others."""
    _log.warning("out of memory, one request is shed: %s", error)
    return OutOfMemoryError(error.message, retry_after_s=None if is_alone else 1.0, metadata=error.metadata)


class _Pause:
    """What happens in the pauses of one step. Counts the seconds that it held the step up."""

    def __init__(self, run: Callable[[], None], clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self.total_s = 0.0

    def __call__(self) -> None:
        start_s = self._clock.monotonic_s()
        self._run()
        self.total_s += self._clock.monotonic_s() - start_s
