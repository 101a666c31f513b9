"""What the decode engine decides and remembers: attempts from acceptance to their last token.

No I/O and no torch. An attempt ends exactly once, with `Finished` or `Failed`, and only when its blocks are free
and nothing writes to them. A copy that runs cannot be called back: an attempt that is cancelled meanwhile ends
when its copy does. A cache that is still computed at its source is copied in parts, as it grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.errors import CancelledError, InternalError, InvalidArgumentError, ResourceExhaustedError, ServingError
from baton.core.generation import FinishReason
from baton.engine.token_rules import RuleBook, take_token
from baton.worker.engine_loop import EngineStats
from baton.worker.messages import Cancel, Failed
from decode_worker.handover import Handover
from decode_worker.messages import (
    Accept,
    EndChoice,
    Finished,
    ForgetPeer,
    Grow,
    HandedOver,
    OpenPeer,
    Park,
    Resume,
    Token,
)
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sequence import DecodeSequence

if TYPE_CHECKING:
    from baton.core.clock import Clock
    from baton.engine.batch import BatchPlan, StepOutput
    from baton.structure.compiler import StructureCompiler
    from decode_worker.messages import DecodeCommand, DecodeEvent
    from decode_worker.movers import Copier, CopyDone, Rooms


class DecodeCore:
    """The books of a decode engine (an `EngineCore`)."""

    def __init__(
        self,
        rooms: Rooms,
        max_num_seqs: int,
        copier: Copier,
        clock: Clock,
        structures: StructureCompiler | None = None,
    ) -> None:
        self._pool, self._swap, self._swapper = rooms.pool, rooms.swap, rooms.swapper
        self._copy_blocks = rooms.copy_blocks
        self._copier = copier
        self._clock = clock
        self._rule_book = RuleBook(structures)
        self._scheduler = DecodeScheduler(rooms.pool, max_num_seqs, rooms.swap)
        self._handovers: dict[str, Handover] = {}
        self._joined_s: dict[str, float] = {}
        self._events: list[DecodeEvent] = []
        # The last plan found nothing to do, and nothing has changed since.
        self._is_stuck = False

    def handle(self, command: DecodeCommand) -> None:
        """Applies a command. Cancel is harmless when what it names has ended."""
        self._is_stuck = False
        match command:
            case Accept():
                self._accept(command)
            case Cancel():
                self._cancel(command.attempt_id)
            case EndChoice():
                self._end_choice(command.attempt_id, command.choice, FinishReason.STOP)
            case Grow():
                if (handover := self._handovers.get(command.attempt_id)) is not None:
                    handover.grow(command.growth)
            case Park():
                self._scheduler.park(command.attempt_id)
            case Resume():
                self._scheduler.resume(command.attempt_id)
            case OpenPeer():
                self._copier.open_peer(command.pool)
            case ForgetPeer():
                self._copier.forget_peer(command.peer)

    def plan(self) -> BatchPlan:
        """Lets copied sequences join, makes room, starts copies for those that have it, and returns the next step."""
        for done in self._copier.take_done():
            self._end_copy(done)
        for handover in [each for each in self._handovers.values() if each.is_done]:
            self._join(handover)
        self._end_swaps()
        swaps, shed = self._scheduler.make_room()
        for swap in swaps:
            assert self._swapper is not None, "swap space without a swapper"
            self._swapper.start(swap)
        for sequence in shed:
            self._end(Failed(attempt_id=sequence.attempt_id, error=_shed()))
        taken = self._scheduler.take_in()
        for sequence in taken:
            handover = self._handovers[sequence.attempt_id]
            handover.sequence = sequence
            handover.copy_started_s = self._clock.monotonic_s()
        for attempt_id, handover in self._handovers.items():
            if handover.has_part:
                part = handover.next_part()
                handover.start(part)
                self._copier.start(attempt_id, part.kv, part.block_ids)
        step = self._scheduler.plan()
        self._is_stuck = not (step.slices or swaps or shed or taken)
        return step

    def commit(self, plan: BatchPlan, output: StepOutput) -> None:
        """Takes a step for done: a token for each sequence of it that is still here."""
        self._is_stuck = False
        for new in self._scheduler.commit(plan, output.tokens):
            if new.attempt_id not in self._joined_s:
                continue  # another of its choices has failed
            self._events.append(
                Token(
                    attempt_id=new.attempt_id,
                    choice=new.choice,
                    position=new.position,
                    token_id=new.token_id,
                    logprobs=output.logprobs.get((new.attempt_id, new.choice)) if output.logprobs else None,
                    finish_reason=new.finish_reason,
                )
            )
            if new.error is not None:
                self._scheduler.remove(new.attempt_id)
                self._end(Failed(attempt_id=new.attempt_id, error=new.error))
            elif new.finish_reason is not None:
                self._end_choice(new.attempt_id, new.choice, new.finish_reason)

    def fail(self, plan: BatchPlan, error: ServingError) -> None:
        """Ends the sequences of a step that failed."""
        self._is_stuck = False
        for attempt_id in dict.fromkeys(piece.attempt_id for piece in plan.slices):
            if self._scheduler.remove(attempt_id) is not None:
                self._end(Failed(attempt_id=attempt_id, error=error))

    def take_events(self) -> tuple[DecodeEvent, ...]:
        """What happened since the last call."""
        events, self._events = tuple(self._events), []
        return events

    @property
    def idle_s(self) -> float | None:
        """0 when something may be done or a copy or a swap has ended; None: sleep until a command or such an end.

        A copy that ended during a step has woken the loop already: nothing would wake it again. The same goes for what
        was told of a growing cache meanwhile.
        """
        has_done = self._copier.has_done or (self._swapper is not None and self._swapper.has_done)
        if has_done or (self._scheduler.has_work and not self._is_stuck):
            return 0.0
        can_go_on = any(handover.has_part or handover.is_done for handover in self._handovers.values())
        return 0.0 if can_go_on else None

    @property
    def stats(self) -> EngineStats:
        """What the engine holds now. What waits for its source to compute more is held."""
        num_idle = sum(handover.waits_for_source for handover in self._handovers.values())
        num_held = self._scheduler.num_parked + num_idle
        is_moving = self._scheduler.is_swapping or any(each.is_copying for each in self._handovers.values())
        return EngineStats(
            num_waiting=self._scheduler.num_waiting - num_idle,
            num_running=self._scheduler.num_running,
            num_held=num_held,
            num_used_blocks=self._pool.num_used,
            is_blocked=self._is_stuck and num_held > 0 and not is_moving,
            preemptions=self._scheduler.preemptions,
        )

    def check_integrity(self) -> None:
        """AssertionError unless nothing is held and no block is lost."""
        self._pool.check_integrity()
        assert self._pool.num_used == 0, f"{self._pool.num_used} blocks are used by nobody"
        attempts = sorted(self._handovers.keys() | self._joined_s.keys())
        assert not attempts, f"attempts without blocks: {attempts}"
        if self._swap is not None:
            self._swap.check_integrity()
            assert self._swap.num_used == 0, f"{self._swap.num_used} slots of the swap space are used by nobody"

    def _accept(self, command: Accept) -> None:
        attempt_id = command.attempt_id
        assert attempt_id not in self._handovers, f"{attempt_id} is here already"
        assert attempt_id not in self._joined_s, f"{attempt_id} is here already"
        self._handovers[attempt_id] = Handover(
            accept=command, block_size=self._pool.block_size, arrived_s=self._clock.monotonic_s()
        )
        self._scheduler.add(
            DecodeSequence(
                attempt_id=attempt_id,
                num_prompt_tokens=command.kv.num_tokens - len(command.output_ids),
                num_resumed=len(command.output_ids),
                num_choices=command.num_choices,
                sampling=command.sampling,
                stop=command.stop,
                top_logprobs=command.top_logprobs,
                tenant=command.tenant,
                priority=command.priority,
            )
        )

    def _cancel(self, attempt_id: str) -> None:
        if self._scheduler.remove(attempt_id) is not None:
            self._end(Failed(attempt_id=attempt_id, error=_cancelled()))
        elif (handover := self._handovers.get(attempt_id)) is not None and not handover.is_copying:
            self._leave(attempt_id, _cancelled())

    def _end_copy(self, done: CopyDone) -> None:
        handover = self._handovers[done.attempt_id]
        if isinstance(done.result, ServingError):
            self._leave(done.attempt_id, done.result)
        elif self._scheduler.is_condemned(done.attempt_id):
            self._leave(done.attempt_id, _cancelled())
        else:
            handover.end(done.result)

    def _join(self, handover: Handover) -> None:
        """The cache and the first tokens are here: the choices that go on after theirs join the batch."""
        attempt_id, sequence = handover.accept.attempt_id, handover.sequence
        assert sequence is not None, "it has blocks"
        try:
            ended = self._begin(sequence, handover)
        except ServingError as error:
            self._leave(attempt_id, error)
            return
        if forks := sequence.forks(self._pool.block_size):
            self._copy_blocks([source for source, _ in forks], [block_id for _, block_id in forks])
        joined = self._scheduler.end_copy(attempt_id, join=True)
        assert joined, "a condemned one has left before"
        del self._handovers[attempt_id]
        self._joined_s[attempt_id] = self._clock.monotonic_s()
        self._events.append(
            HandedOver(
                attempt_id=attempt_id,
                transport=handover.transport,
                num_bytes=handover.num_bytes,
                wait_s=handover.copy_started_s - handover.arrived_s,
                copy_s=handover.copy_s,
                num_parts=handover.num_parts,
            )
        )
        for choice in ended:
            self._scheduler.end_choice(attempt_id, choice)

    def _begin(self, sequence: DecodeSequence, handover: Handover) -> list[int]:
        """Gives each branch its first token; returns the choices that end with theirs, which are not all of them."""
        command, ended = handover.accept, []
        for branch, token_id in zip(sequence.branches, handover.first_token_ids, strict=True):
            # The state in which the prefill worker chose the first token, made anew.
            branch.rules = self._rule_book.start(command, command.prompt_ids, command.output_ids)
            branch.last_token_id = token_id
            if take_token(branch.rules, command.stop, token_id, sequence.num_generated(branch)) is not None:
                ended.append(branch.choice)
        if len(ended) == len(sequence.branches):
            raise InvalidArgumentError("first_token_id", "ends the generation: nothing follows it")
        return ended

    def _end_choice(self, attempt_id: str, choice: int, reason: FinishReason) -> None:
        sequence = self._scheduler.end_choice(attempt_id, choice)
        if sequence is not None:
            self._end(
                Finished(
                    attempt_id=attempt_id,
                    reason=reason,
                    num_steps=sequence.num_steps,
                    generate_s=self._clock.monotonic_s() - self._joined_s[attempt_id],
                )
            )

    def _leave(self, attempt_id: str, error: ServingError) -> None:
        """Ends an attempt whose blocks nothing writes to, and which has not joined."""
        self._scheduler.end_copy(attempt_id, join=False)
        self._end(Failed(attempt_id=attempt_id, error=error))

    def _end_swaps(self) -> None:
        for done in self._swapper.take_done() if self._swapper is not None else ():
            if not self._scheduler.end_swap(done.attempt_id, succeeded=done.succeeded):
                error = _cancelled() if done.succeeded else InternalError("a copy to or from the swap space failed")
                self._end(Failed(attempt_id=done.attempt_id, error=error))

    def _end(self, event: Finished | Failed) -> None:
        self._handovers.pop(event.attempt_id, None)
        self._joined_s.pop(event.attempt_id, None)
        self._events.append(event)


def _cancelled() -> CancelledError:
    return CancelledError("the generation was cancelled")


def _shed() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "the KV blocks ran short and the swap space has no room for this sequence",
        reason="OUT_OF_BLOCKS",
        retry_after_s=1.0,
    )
