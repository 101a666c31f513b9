"""What the prefill engine decides and remembers: attempts from submission to the end of their lease.

No I/O and no torch. An attempt ends exactly once, with `Released` or `Failed`, and always by way of `_end`, which
frees its blocks first; what still names it later finds nothing and does nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from baton.core.errors import CancelledError, ServingError
from baton.engine.token_rules import RuleBook, take_token
from baton.worker.engine_loop import EngineStats
from baton.worker.messages import Cancel, Failed
from kv_transfer.errors import LeaseNotFoundError
from kv_transfer.lease import LeaseOutcome
from prefill_worker.messages import (
    CacheGrown,
    FirstToken,
    HeldCache,
    PromptDone,
    PromptScored,
    Released,
    ReleaseLease,
    RenewLease,
    Started,
    Submit,
)
from prefill_worker.scheduler import Prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.core.clock import Clock
    from baton.engine.batch import BatchPlan, StepOutput
    from baton.engine.token_rules import TokenRules
    from baton.structure.compiler import StructureCompiler
    from kv_transfer.lease import EndedLease, Lease, LeaseTable
    from prefill_worker.messages import PrefillCommand, PrefillEvent
    from prefill_worker.scheduler import PrefillScheduler


class PrefillCore:
    """The books of a prefill engine (an `EngineCore`).

    `leases` has a slot for each attempt that `scheduler` runs at a time. An attempt's blocks belong to the
    scheduler from its first chunk until its lease has ended. The lease of a prompt of several chunks begins after
    the first one, and grows with each.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        leases: LeaseTable,
        clock: Clock,
        structures: StructureCompiler | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._leases = leases
        self._clock = clock
        self._rule_book = RuleBook(structures)
        # Leases that their readers gave up before the prompts were done.
        self._given_up: dict[str, EndedLease] = {}
        self._attempts: dict[str, Submit] = {}
        # Blocks of attempts in a planned step are being written: a cancel has to wait for the step's end.
        self._computing: set[str] = set()
        self._cancelled: set[str] = set()
        self._events: list[PrefillEvent] = []

    def handle(self, command: PrefillCommand) -> None:
        """Applies a command, also between `plan` and `commit`. All but Submit are harmless for what has ended."""
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                self._cancel(command.attempt_id)
            case RenewLease():
                with contextlib.suppress(LeaseNotFoundError):  # the reader learns it from the fence
                    self._leases.renew(command.lease_id)
            case ReleaseLease():
                self._end_lease(self._leases.release(command.lease_id, command.outcome))

    def plan(self) -> BatchPlan:
        """Ends overdue leases, gives blocks to waiting attempts, and returns the next step."""
        self._let_time_pass()
        return self._begin(self._scheduler.plan())

    def plan_interrupt(self, step: BatchPlan) -> BatchPlan:
        """Like `plan`, in the middle of `step`: what may hold it up, to be committed before it."""
        self._let_time_pass()
        return self._begin(self._scheduler.plan_interrupt(step))

    def commit(self, plan: BatchPlan, output: StepOutput) -> None:
        """Takes a step for done: a prompt that ended with it goes under its lease, or ends with its first token."""
        self._end_step(plan)
        if output.prompt_logprobs:
            self._tell_scores(plan, output)
        ended = self._scheduler.commit(plan)
        for piece in plan.slices:
            self._grow(piece.attempt_id)
        for index, prefill in ended:
            token_id = output.tokens[index]
            assert token_id is not None, f"{prefill.attempt_id}: a prompt's last chunk without a token"
            submit = self._attempts[prefill.attempt_id]
            try:
                token_ids = [token_id, *output.other_tokens.get(submit.attempt_id, ())]
                first_tokens = self._take_first(submit, prefill.rules, token_ids, output)
            except ServingError as error:
                self._end(Failed(attempt_id=prefill.attempt_id, error=error))
                continue
            is_over = all(each.finish_reason is not None for each in first_tokens)
            self._events.append(
                PromptDone(
                    attempt_id=prefill.attempt_id,
                    first_tokens=first_tokens,
                    compute_s=self._clock.monotonic_s() - prefill.started_s,
                    num_chunks=prefill.num_chunks,
                    num_cached_tokens=prefill.num_cached_tokens,
                    cache=None if is_over else self._hold(submit.lease_id, prefill),
                )
            )
            given_up = self._given_up.get(prefill.attempt_id)
            if is_over or given_up is not None:
                outcome = None if given_up is None else given_up.outcome
                self._end(Released(attempt_id=prefill.attempt_id, outcome=outcome))

    def fail(self, plan: BatchPlan, error: ServingError) -> None:
        """Ends the attempts of a step that failed."""
        self._end_step(plan)
        for piece in plan.slices:
            if piece.attempt_id in self._attempts:
                self._end(Failed(attempt_id=piece.attempt_id, error=error))

    def take_events(self) -> tuple[PrefillEvent, ...]:
        """What happened since the last call."""
        events, self._events = tuple(self._events), []
        return events

    @property
    def idle_s(self) -> float | None:
        """0 when a step can run; else until the next lease runs out; None: sleep until the next command."""
        return 0.0 if self._scheduler.has_step else self._leases.next_expiry_s()

    @property
    def stats(self) -> EngineStats:
        """What the engine holds now."""
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_held=self._scheduler.num_held,
            num_used_blocks=self._scheduler.num_used_blocks,
            is_blocked=not self._scheduler.has_step and self._scheduler.num_held > 0,
        )

    def check_integrity(self) -> None:
        """AssertionError unless nothing is held and no block or lease slot is lost."""
        self._scheduler.check_integrity()
        self._leases.check_integrity()
        assert not self._attempts, f"attempts without blocks: {sorted(self._attempts)}"

    def _let_time_pass(self) -> None:
        for ended in self._leases.expire():
            self._end_lease(ended)
        now_s = self._clock.monotonic_s()
        for prefill in self._scheduler.start_waiting(now_s):
            self._events.append(Started(attempt_id=prefill.attempt_id, queue_s=now_s - prefill.arrived_s))

    def _begin(self, plan: BatchPlan) -> BatchPlan:
        self._computing.update(piece.attempt_id for piece in plan.slices)
        return plan

    def _end_step(self, plan: BatchPlan) -> None:
        for piece in plan.slices:
            self._computing.remove(piece.attempt_id)
            if piece.attempt_id in self._cancelled:
                self._cancelled.remove(piece.attempt_id)
                self._cancel(piece.attempt_id)

    def _submit(self, command: Submit) -> None:
        assert command.attempt_id not in self._attempts, f"{command.attempt_id} is here already"
        try:
            rules = self._rules(command)
        except ServingError as error:
            self._events.append(Failed(attempt_id=command.attempt_id, error=error))
            return
        self._attempts[command.attempt_id] = command
        self._scheduler.add(
            Prefill(
                attempt_id=command.attempt_id,
                token_ids=command.token_ids,
                sampling=command.sampling,
                arrived_s=self._clock.monotonic_s(),
                rules=rules,
                logprobs=command.logprobs,
                cache_salt=command.cache_salt,
                num_choices=command.num_choices,
            )
        )

    def _rules(self, command: Submit) -> TokenRules | None:
        """By what an output's first token is chosen."""
        num_prompt_tokens = command.num_prompt_tokens
        return self._rule_book.start(
            command, command.token_ids[:num_prompt_tokens], command.token_ids[num_prompt_tokens:]
        )

    def _take_first(
        self, submit: Submit, rules: TokenRules | None, token_ids: Sequence[int], output: StepOutput
    ) -> tuple[FirstToken, ...]:
        """What the first token of each choice makes of it; `rules` are the first's. Raises as `take_token` does."""
        first_tokens = []
        for choice, token_id in enumerate(token_ids):
            of_choice = self._rules(submit) if choice else rules
            reason = take_token(of_choice, submit.stop, token_id, submit.num_output_tokens + 1)
            first_tokens.append(FirstToken(token_id, reason, output.logprobs.get((submit.attempt_id, choice))))
        return tuple(first_tokens)

    def _tell_scores(self, plan: BatchPlan, output: StepOutput) -> None:
        for piece in plan.slices:
            logprobs = output.prompt_logprobs.get(piece.attempt_id)
            if logprobs and piece.attempt_id in self._attempts:
                self._events.append(
                    PromptScored(
                        attempt_id=piece.attempt_id, first_position=piece.start_position + 1, logprobs=logprobs
                    )
                )

    def _grow(self, attempt_id: str) -> None:
        """Lets the reader of an attempt that still runs have what is computed."""
        block_ids = self._scheduler.computed_blocks(attempt_id)
        submit = self._attempts.get(attempt_id)
        if submit is None or not block_ids or attempt_id in self._given_up:
            return
        if submit.stop.max_tokens == submit.num_output_tokens + 1:  # no cache is kept
            return
        lease = self._leases.find(submit.lease_id)
        is_new = lease is None
        if lease is None:
            lease = self._leases.grant(submit.lease_id, attempt_id, block_ids, is_growing=True)
        elif len(block_ids) > len(lease.block_ids):
            lease = self._leases.grow(submit.lease_id, block_ids[len(lease.block_ids) :])
        else:
            return
        self._events.append(CacheGrown(attempt_id=attempt_id, cache=_held(lease), is_new=is_new))

    def _hold(self, lease_id: str, prefill: Prefill) -> HeldCache:
        """The whole cache under its lease; where its reader has given that up, what it was."""
        if (given_up := self._given_up.get(prefill.attempt_id)) is not None:
            return _held(given_up.lease)
        growing = self._leases.find(lease_id)
        if growing is None:
            return _held(self._leases.grant(lease_id, prefill.attempt_id, prefill.block_table))
        return _held(self._leases.grow(lease_id, prefill.block_table[len(growing.block_ids) :], is_complete=True))

    def _cancel(self, attempt_id: str) -> None:
        submit = self._attempts.get(attempt_id)
        if submit is None:
            return
        if attempt_id in self._computing:
            self._cancelled.add(attempt_id)  # `_end_step` comes back to it
            return
        lease = self._leases.find(submit.lease_id)
        if lease is not None and not lease.is_growing:
            self._end_lease(self._leases.release(submit.lease_id, LeaseOutcome.ABANDONED))
        else:
            self._end(Failed(attempt_id=attempt_id, error=CancelledError("the prefill was cancelled")))

    def _end_lease(self, ended: EndedLease | None) -> None:
        if ended is not None and ended.lease.is_growing:
            self._given_up[ended.lease.attempt_id] = ended  # the computation has the blocks; it goes on
        elif ended is not None:
            self._end(Released(attempt_id=ended.lease.attempt_id, outcome=ended.outcome))

    def _end(self, event: Released | Failed) -> None:
        submit = self._attempts.pop(event.attempt_id)
        self._leases.release(submit.lease_id, LeaseOutcome.ABANDONED)
        self._given_up.pop(event.attempt_id, None)
        was_here = self._scheduler.release(event.attempt_id)
        assert was_here, f"{event.attempt_id} has ended before"
        self._events.append(event)


def _held(lease: Lease) -> HeldCache:
    return HeldCache(lease_id=lease.lease_id, slot=lease.slot, generation=lease.generation, block_ids=lease.block_ids)
