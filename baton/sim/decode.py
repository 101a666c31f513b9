"""A decode worker of a simulation: the production scheduler over real block pools, on a virtual clock.

From one plan to the next the scheduler often has nothing to decide: nobody joins or ends, and there are blocks for all.
Then the batch is the same again and each sequence has one token more. Such steps are not planned one by one: the worker
looks ahead to the step that ends an output, or to the last one that the free blocks suffice for, and what comes to it
before that ends the jump with the step that runs then. Who waits gets no room within a jump, for growing takes a block
for each that it was promised. So the scheduler is in the same state as after as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core.generation import SamplingParams, StopRule
from baton.engine.block_pool import BlockPool
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:
    from baton.engine.batch import BatchPlan
    from baton.sim.load import Arrival, Costs
    from baton.sim.workers import WorkerSize

_GREEDY = SamplingParams(temperature=0.0)
# The tokens of a simulated model: one that ends an output, and all others.
_LAST, _OTHER = 1, 0
_ENDS = frozenset({_LAST})


@dataclass(slots=True)
class Begun:
    """What a plan began beside its step: copies and swaps, with the seconds that they take from now on.

    `preempted` are those that are swapped out; `shed` are gone.
    """

    copies: list[tuple[str, float]] = field(default_factory=list)
    swaps: list[tuple[str, float]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    shed: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """Steps that follow each other with one batch. `plan` is that of the first where it is made already."""

    began_s: float
    step_s: float
    num_steps: int
    ends_output: bool
    plan: BatchPlan | None


class SimDecode:
    """From `begin` to `end_s` steps run, which `end` takes for done; copies and swaps go on beside them.

    Before anything is told to it, it has to `catch_up`.
    """

    def __init__(self, size: WorkerSize, costs: Costs) -> None:
        self._pool = BlockPool(size.num_blocks, size.block_size)
        self._swap = BlockPool(size.num_swap_blocks, size.block_size) if size.num_swap_blocks else None
        self._costs = costs
        self._scheduler = DecodeScheduler(self._pool, size.max_num_seqs, self._swap)
        self._run: _Run | None = None
        self._sequences: dict[str, DecodeSequence] = {}
        # Where each output's last step writes, by attempt.
        self._last_positions: dict[str, tuple[int, ...]] = {}
        self._joined: dict[str, DecodeSequence] = {}
        # Swapped out, or on the way out or back.
        self._out: dict[str, DecodeSequence] = {}
        self._copied: list[str] = []
        self._moved: list[str] = []
        self._swapper_free_s = 0.0
        self.end_s: float | None = None
        self.num_blocks = size.num_blocks
        self.most_used_blocks = 0

    def add(self, attempt_id: str, arrival: Arrival) -> None:
        """Takes a request over whose first tokens are known."""
        sequence = self._sequences[attempt_id] = DecodeSequence(
            attempt_id=attempt_id,
            num_prompt_tokens=arrival.prompt_tokens,
            sampling=_GREEDY,
            stop=StopRule(max_tokens=arrival.max_tokens, stop_token_ids=_ENDS),
            num_choices=len(arrival.output_tokens),
            tenant=arrival.tenant,
        )
        self._last_positions[attempt_id] = tuple(arrival.prompt_tokens + each - 2 for each in arrival.output_tokens)
        self._scheduler.add(sequence)

    def end_copy(self, attempt_id: str) -> None:
        """The cache is here: the request joins the next step."""
        self._copied.append(attempt_id)

    def end_swap(self, attempt_id: str) -> None:
        """A swap is over: the next plan sees it."""
        self._moved.append(attempt_id)

    def begin(self, now_s: float) -> Begun:
        """Plans as the production engine does, and begins the next step, if there is one, unless one runs."""
        begun = Begun()
        if self._run is not None:
            return begun
        self._let_in()
        while True:
            swaps, shed = self._scheduler.make_room()
            taken = self._scheduler.take_in()
            for swap in swaps:
                self._out[swap.attempt_id] = self._sequences[swap.attempt_id]
                seconds = self._costs.swap_token_s * len(swap.slots) * self._pool.block_size
                self._swapper_free_s = max(self._swapper_free_s, now_s) + seconds
                begun.swaps.append((swap.attempt_id, self._swapper_free_s - now_s))
                if swap.is_out:
                    begun.preempted.append(swap.attempt_id)
            for sequence in shed:
                self._forget(sequence.attempt_id)
                begun.shed.append(sequence.attempt_id)
            for sequence in taken:
                seconds = self._costs.handover_s + self._costs.handover_token_s * sequence.num_prompt_tokens
                begun.copies.append((sequence.attempt_id, seconds))
            self._note_use()
            if self._begin_run(now_s) or not (swaps or shed or taken):
                return begun

    def catch_up(self, now_s: float) -> None:
        """Takes the steps for done that have ended by now, and lets the next plan follow the one that runs."""
        run = self._run
        if run is None or run.num_steps == 1:
            return
        num_done = 0
        while num_done < run.num_steps - 1 and run.began_s + run.step_s <= now_s:
            run.began_s += run.step_s
            num_done += 1
        self._advance(num_done)
        run.ends_output = run.ends_output and num_done == run.num_steps - 1
        run.num_steps = 1
        self.end_s = run.began_s + run.step_s

    def end(self) -> list[str]:
        """Takes the steps for done; returns the requests that ended with the last: their blocks are free."""
        run, self._run, self.end_s = self._run, None, None
        assert run is not None, "no step runs"
        self._advance(run.num_steps - 1)
        if run.plan is None and not run.ends_output:
            self._move_on(1)
            return []
        plan = run.plan or self._scheduler.plan()
        tokens = [
            _LAST if self._last_positions[s.attempt_id][s.choice] == s.start_position else _OTHER for s in plan.slices
        ]
        ended = []
        for new in self._scheduler.commit(plan, tokens):
            if new.finish_reason is not None and self._scheduler.end_choice(new.attempt_id, new.choice) is not None:
                self._forget(new.attempt_id)
                ended.append(new.attempt_id)
        return ended

    def look_ahead(self) -> tuple[int, bool]:
        """How many steps have nothing to decide before the last of them has ended, and whether that ends an output.

        0: the next one is to be planned.
        """
        if self._out or not self._joined:
            return 0, False
        to_an_end = min(
            self._last_positions[attempt_id][branch.choice] - branch.last_position + 1
            for attempt_id, sequence in self._joined.items()
            for branch in sequence.branches
        )
        num_steps = to_an_end
        while num_steps and self._num_lacking(num_steps) > self._pool.num_free:
            num_steps //= 2
        return num_steps, num_steps == to_an_end

    def assert_idle(self) -> None:
        """AssertionError unless no block and no slot is held."""
        for pool in (self._pool, self._swap):
            if pool is not None:
                pool.check_integrity()
                assert pool.num_used == 0, "blocks are held by nobody"

    def _let_in(self) -> None:
        """Lets those join whose copies have ended, and swaps end."""
        for attempt_id in self._copied:
            joined = self._scheduler.end_copy(attempt_id, join=True)
            assert joined, "nobody leaves while it is copied"
            sequence = self._joined[attempt_id] = self._sequences[attempt_id]
            for choice, last in enumerate(self._last_positions[attempt_id]):
                if last < sequence.num_prompt_tokens:  # its first token was its last
                    self._scheduler.end_choice(attempt_id, choice)
        for attempt_id in self._moved:
            self._scheduler.end_swap(attempt_id, succeeded=True)
            if not self._out[attempt_id].slots:
                del self._out[attempt_id]
        self._copied.clear()
        self._moved.clear()

    def _begin_run(self, now_s: float) -> bool:
        """Begins the next step, and those after it that need no plan of their own; False when there is none."""
        num_steps, ends_output = self.look_ahead()
        plan = None if num_steps else self._scheduler.plan()
        num_slices = sum(len(each.branches) for each in self._joined.values()) if plan is None else len(plan.slices)
        if num_slices == 0:
            return False
        step_s = self._costs.decode_step_s + self._costs.decode_seq_s * num_slices
        self._run = _Run(now_s, step_s, max(num_steps, 1), ends_output, plan)
        self.end_s = now_s
        for _ in range(self._run.num_steps):
            self.end_s += step_s  # rounded as if each step were waited for
        return True

    def _num_lacking(self, num_steps: int) -> int:
        """Blocks that those who have joined are short of for so many steps."""
        block_size, before_last = self._pool.block_size, num_steps - 1
        lacking = 0
        for sequence in self._joined.values():
            for branch in sequence.branches:
                num_wanted = (branch.last_position + before_last) // block_size + 1
                lacking += max(0, num_wanted - len(branch.block_table))
        return lacking

    def _advance(self, num_steps: int) -> None:
        """Takes steps of which none ends an output for done, and lets the scheduler give the blocks for one more."""
        if num_steps == 0:
            return
        self._move_on(num_steps)
        while self._num_lacking(1):
            swaps, shed = self._scheduler.make_room()
            assert not swaps, "blocks suffice for all that was looked ahead to"
            assert not shed, "blocks suffice for all that was looked ahead to"
        self._note_use()

    def _move_on(self, num_steps: int) -> None:
        """As `DecodeScheduler.commit` would, with tokens that end nothing."""
        for sequence in self._joined.values():
            for branch in sequence.branches:
                branch.last_position += num_steps
                branch.num_steps += num_steps

    def _note_use(self) -> None:
        self.most_used_blocks = max(self.most_used_blocks, self._pool.num_used)

    def _forget(self, attempt_id: str) -> None:
        del self._sequences[attempt_id], self._last_positions[attempt_id]
        self._joined.pop(attempt_id, None)
        self._out.pop(attempt_id, None)
