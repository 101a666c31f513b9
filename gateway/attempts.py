"""The attempts at one request: one, and another for each worker that is lost on the way.

    wait for a pair of workers -> prefill, first token -> hand over -> decode -> finish
                 ^                     |                     |           |
                 +---------------------+-- a worker is lost -+-----------+

What an attempt holds lies in nested blocks: its place in the queue (with the credit of the granted pair) around the
prefill call around the decode call. However it ends, they are left from the inside out: calls are cancelled first,
credit goes back after them. A cancelled worker frees the attempt's blocks at its next step, some milliseconds after
the credit went back; who is granted in between waits that long inside the worker.

The next attempt has the prompt and all output so far for its prompt. The token at a position depends on the tokens
before it, the request and the position alone, so the output goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.core.errors import ResourceExhaustedError, ServingError, UnavailableError
from baton.core.generation import FinishReason
from baton.core.ids import new_attempt_id
from gateway.losses import loss_of
from gateway.worker_calls import DecodeEnd, FirstToken, GrowingCache

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from baton.coordination.place import Place
    from baton.coordination.queue import AdmissionQueue
    from baton.core.workers import Grant, Ticket
    from gateway.events import Event, ScoredPrompt
    from gateway.losses import Loss
    from gateway.output import Output
    from gateway.phases import Phases
    from gateway.prefixes import KnownPrefixes
    from gateway.progress import Progress
    from gateway.routing import Router
    from gateway.worker_calls import Attempt, DecodeCall, PrefillCall, WorkerCalls

_log = logging.getLogger(__name__)

Emit: TypeAlias = "Callable[[Event], Awaitable[None]]"
Finish: TypeAlias = "Callable[[FinishReason | None, int], Awaitable[None]]"

# How long a finished request waits to see the prefill worker's blocks free, so that credit follows the free.
_RELEASE_WAIT_S = 2.0
# After a full queue wait, the load is not gone in an instant.
_QUEUE_RETRY_AFTER_S = 5.0
# A worker without a heartbeat for 2.5 s is listed no more: one that is listed after this has beaten since it was lost.
_DOUBT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Where attempts run. `max_retries`: how many attempts of one request may follow its first."""

    queue: AdmissionQueue
    router: Router
    workers: WorkerCalls
    prefixes: KnownPrefixes
    max_retries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What the attempts at one request share."""

    output: Output
    progress: Progress
    phases: Phases
    emit: Emit
    remaining_s: Callable[[], float]
    queue_timeout_s: float
    prefix_names: Sequence[bytes]


class Attempts:
    """Serves one request. `first` is what the first attempt sends; the ids of its attempts are those of its places."""

    def __init__(self, deployment: Deployment, course: Course, first: Attempt) -> None:
        self._deployment = deployment
        self._course = course
        self._first = first
        self._output_ids: list[int] = []
        self._next_scored = 1
        self._cached_tokens = 0
        self._lost_lives: set[str] = set()
        self._num_retries = 0

    async def run(self, place: Place, finish: Finish) -> None:
        """Runs attempts, the first in `place`, until one is complete; returns when what it held is given back.

        `finish` is awaited once, with the reason and the cached prompt tokens, as soon as the output is complete.
        Raises UnavailableError, WORKER_LOST, when workers were lost `max_retries` + 1 times or no other can take over,
        and every other failure of an attempt as it is.
        """
        async with AsyncExitStack() as places:
            while (loss := await self._try(place, finish)) is not None:
                place = await self._follow(place, loss, places)

    async def _try(self, place: Place, finish: Finish) -> Loss | None:
        """One attempt; None when it is complete."""
        grant: Grant | None = None
        try:
            grant = await self._wait_for_workers(place)
            await self._serve(grant, self._attempt(place.ticket), place, finish)
        except UnavailableError as error:
            if (loss := loss_of(error, grant)) is None:
                raise
            return loss
        return None

    def _attempt(self, ticket: Ticket) -> Attempt:
        if not self._output_ids:
            return dataclasses.replace(self._first, attempt_id=ticket.attempt_id)
        return dataclasses.replace(
            self._first,
            attempt_id=ticket.attempt_id,
            token_ids=(*self._first.token_ids, *self._output_ids),
            num_output_tokens=len(self._output_ids),
            # With the first token the whole prompt was scored.
            logprobs=dataclasses.replace(self._first.logprobs, prompt_top=None),
        )

    # --- after a loss -----------------------------------------------------------------------------------------

    async def _follow(self, former: Place, loss: Loss, places: AsyncExitStack) -> Place:
        """A place for the next attempt: granted, or waiting. Raises the loss's error when there can be none."""
        self._require_wanted(loss)
        self._num_retries += 1
        self._course.progress.lost_worker(loss.role)
        loss.tell(former.ticket, num_output_tokens=len(self._output_ids), num_retries=self._num_retries)
        if loss.worker is not None:
            self._lost_lives.add(loss.worker.incarnation)
        place = await self._readmit(former, loss, places, avoids=frozenset(self._lost_lives))
        if await self._finds_nobody(place):
            place = await self._readmit(place, loss, places, avoids=frozenset())
        return place

    async def _finds_nobody(self, place: Place) -> bool:
        """Whether there are no workers for an attempt for as long as those that were lost may still be listed."""
        with self._course.phases.enter("queue"):
            try:
                async with asyncio.timeout(_DOUBT_S):
                    await place.granted()
            except TimeoutError:
                return True
            except UnavailableError:  # as the attempt's own wait will be told
                return False
        return False

    def _require_wanted(self, loss: Loss) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # it came when the lost attempt was being left, and was lost there
            raise asyncio.CancelledError
        if self._num_retries >= self._deployment.max_retries:
            raise loss.error

    async def _readmit(self, former: Place, loss: Loss, places: AsyncExitStack, *, avoids: frozenset[str]) -> Place:
        queue, router = self._deployment.queue, self._deployment.router
        ticket = dataclasses.replace(
            former.ticket,
            attempt_id=new_attempt_id(),
            prompt_tokens=len(self._first.token_ids) + len(self._output_ids),
            max_tokens=self._first.stop.max_tokens - len(self._output_ids),
            max_wait_s=min(self._course.queue_timeout_s, self._course.remaining_s()),
            avoids=avoids,
            # By now some worker may have the prompt.
            cached=self._deployment.prefixes.cached_tokens(self._course.prefix_names, queue.views),
        )
        # As for a new request: one that no worker could hold would wait at the head of its class.
        room = router.most_output_tokens(ticket.prompt_tokens, queue.views)
        if router.has_pair(queue.views) and ticket.max_tokens > room:
            raise loss.error
        return await places.enter_async_context(queue.readmit(former, ticket))

    # --- one attempt ------------------------------------------------------------------------------------------

    async def _wait_for_workers(self, place: Place) -> Grant:
        timeout_s = self._course.queue_timeout_s
        with self._course.phases.enter("queue"):
            try:
                async with asyncio.timeout(timeout_s):
                    grant = await place.granted()
            except TimeoutError as error:
                if not self._deployment.router.has_pair(self._deployment.queue.views):
                    raise no_worker(self._first.fingerprint.model) from error
                raise ResourceExhaustedError(
                    f"no pair of workers had room within {timeout_s:g} s",
                    reason="QUEUE_TIMEOUT",
                    retry_after_s=_QUEUE_RETRY_AFTER_S,
                ) from error
        self._course.progress.granted()
        return grant

    async def _serve(self, grant: Grant, attempt: Attempt, place: Place, finish: Finish) -> None:
        """From the grant to the end of the calls."""
        output, emit = self._course.output, self._course.emit
        try:
            async with self._prefill(grant, attempt) as (call, first, early):
                self._output_ids.append(first.token_id)
                await emit(output.push((first.token_id,), first.logprobs))
                has_more = first.kv is not None and not output.is_stopped
                async with asyncio.TaskGroup() as tasks:
                    release = tasks.create_task(_release_prefill(call, place))
                    reason = first.finish_reason
                    if has_more:
                        reason = await self._decode(grant, early or self._open_decode(grant, attempt, first))
                    await finish(reason, self._cached_tokens)
                    if has_more or first.kv is None:  # else nobody takes the cache over: leaving gives it up
                        await asyncio.wait([release], timeout=_RELEASE_WAIT_S)
                    release.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from group

    @asynccontextmanager
    async def _prefill(
        self, grant: Grant, attempt: Attempt
    ) -> AsyncIterator[tuple[PrefillCall, FirstToken, DecodeCall | None]]:
        """The prefill call and its first token; the call stays open, and with it the lease, for the block.

        And the decode call, where the decode worker takes the cache over as it grows. How that fares is seen when it is
        read, after the first token.
        """
        early: DecodeCall | None = None
        async with AsyncExitStack() as stack:
            with self._course.phases.enter("prefill") as span:
                span.set_attribute("baton.worker_id", grant.prefill.worker_id)
                call = self._deployment.workers.prefill(grant.prefill, attempt, self._course.remaining_s())
                await stack.enter_async_context(call)
                while not isinstance(first := await call.next(), FirstToken):
                    if isinstance(first, GrowingCache):
                        early = await stack.enter_async_context(self._open_decode(grant, attempt, first))
                    else:
                        await self._emit_scored(first)
            self._deployment.prefixes.learn(self._course.prefix_names, grant.prefill)
            if not self._output_ids:
                self._cached_tokens = first.cached_tokens
                self._course.progress.first_token()
            else:
                self._course.progress.tokens(1)
            yield call, first, early

    def _open_decode(self, grant: Grant, attempt: Attempt, cache: FirstToken | GrowingCache) -> DecodeCall:
        return self._deployment.workers.decode(grant.decode, attempt, cache, self._course.remaining_s())

    async def _emit_scored(self, scored: ScoredPrompt) -> None:
        """Emits what no earlier attempt has scored."""
        num_known = self._next_scored - scored.first_position
        self._next_scored = max(self._next_scored, scored.first_position + len(scored.token_ids))
        if num_known < len(scored.token_ids):
            await self._course.emit(
                dataclasses.replace(
                    scored,
                    first_position=scored.first_position + num_known,
                    token_ids=scored.token_ids[num_known:],
                    logprobs=scored.logprobs[num_known:],
                )
            )

    async def _decode(self, grant: Grant, call: DecodeCall) -> FinishReason | None:
        course = self._course
        with course.phases.enter("decode") as span:
            span.set_attribute("baton.worker_id", grant.decode.worker_id)
            async with call:
                with course.phases.enter("handover") as handover_span:
                    handover = await call.handover()
                    handover_span.set_attribute("baton.handover.transport", handover.transport)
                    handover_span.set_attribute("baton.handover.num_bytes", handover.num_bytes)
                course.progress.handed_over()
                course.phases.name = "decode"
                while not isinstance(event := await call.next(), DecodeEnd):
                    self._output_ids += event.ids
                    delta = course.output.push(event.ids, event.logprobs)
                    course.progress.tokens(len(delta.token_ids))
                    await course.emit(delta)
                    if course.output.is_stopped:
                        return FinishReason.STOP  # leaving the block cancels the call
                await call.ended()
                return event.reason


def no_worker(model: str) -> UnavailableError:
    """No wait can serve a request now."""
    return UnavailableError(f"no pair of workers serves {model!r} now", reason="NO_WORKER")


async def _release_prefill(call: PrefillCall, place: Place) -> None:
    """Gives the prefill worker's credit back when its blocks are free."""
    try:
        await call.released()
    except ServingError as error:
        # The decode worker notices by itself if it still needed the blocks; then its stream carries the error.
        _log.warning("prefill worker failed after the first token: %s", error.reason)
    await place.release_prefill()
    await call.ended()


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a task group wrapped; the first of several."""
    error = group.exceptions[0]
    return _cause(error) if isinstance(error, BaseExceptionGroup) else error
