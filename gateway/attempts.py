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

One attempt makes all outputs of the prompt. Where several are cut off, which go on in different ways, an attempt for
each follows, one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from baton.core.errors import OutOfRangeError, ResourceExhaustedError, ServingError, UnavailableError
from baton.core.ids import new_attempt_id
from gateway.capacity import no_worker, refusal_of
from gateway.losses import loss_of
from gateway.worker_events import DecodeEnd, GrowingCache, PromptDone

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from baton.coordination.place import Place
    from baton.coordination.queue import AdmissionQueue
    from baton.core.workers import Grant, Ticket
    from gateway.course import Course
    from gateway.losses import Loss
    from gateway.prefixes import KnownPrefixes
    from gateway.routing import Router
    from gateway.worker_calls import Attempt, DecodeCall, PrefillCall, WorkerCalls
    from gateway.worker_events import DecodeEvent

_log = logging.getLogger(__name__)

Finish: TypeAlias = "Callable[[int], Awaitable[None]]"

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


class Attempts:
    """Serves one request. `first` makes all its outputs; the ids of its attempts are those of its places."""

    def __init__(self, deployment: Deployment, course: Course, first: Attempt) -> None:
        self._deployment = deployment
        self._course = course
        self._first = first
        self._lost_lives: set[str] = set()
        self._last_loss: Loss | None = None
        self._num_retries = 0

    async def run(self, place: Place, finish: Finish) -> None:
        """Runs attempts, the first in `place`, until all is done; returns when what they held is given back.

        `finish` is awaited once, with the cached prompt tokens, as soon as all outputs are complete.
        Raises UnavailableError, WORKER_LOST, when workers were lost `max_retries` + 1 times or no other can take over,
        and every other failure of an attempt as it is.
        """
        async with AsyncExitStack() as places:
            while True:
                loss = await self._try(place, finish)
                if loss is not None:
                    self._note(loss, place.ticket)
                else:
                    loss = self._last_loss
                    if loss is None or not self._course.open_outputs(self._first):
                        return
                    self._course.progress.waits_again()
                place = await self._follow(place, loss, places)

    async def _try(self, place: Place, finish: Finish) -> Loss | None:
        """One attempt; None when it is complete."""
        grant: Grant | None = None
        try:
            grant = await self._wait_for_workers(place)
            await self._serve(grant, self._rest(place.ticket.attempt_id), place, finish)
        except UnavailableError as error:
            if (loss := loss_of(error, grant)) is None:
                raise
            return loss
        return None

    def _rest(self, attempt_id: str) -> Attempt:
        """The next attempt: at everything, or once there is output at the first one that is not complete."""
        if not self._course.num_output_tokens:
            return dataclasses.replace(self._first, attempt_id=attempt_id)
        output = self._course.open_outputs(self._first)[0]
        return dataclasses.replace(
            self._first,
            attempt_id=attempt_id,
            choices=(output.choice,),
            sampling=self._first.sampling.of_choice(output.choice),
            token_ids=(*self._first.token_ids, *output.token_ids),
            num_output_tokens=len(output.token_ids),
            # With the first token the whole prompt was scored.
            logprobs=dataclasses.replace(self._first.logprobs, prompt_top=None),
        )

    # --- after a loss -----------------------------------------------------------------------------------------

    def _note(self, loss: Loss, ticket: Ticket) -> None:
        """Takes note of a loss that another attempt may follow; raises its error when none may."""
        self._require_wanted(loss)
        self._last_loss = loss
        self._num_retries += 1
        self._course.progress.lost_worker(loss.role)
        loss.tell(ticket, num_output_tokens=self._course.num_output_tokens, num_retries=self._num_retries)
        if loss.worker is not None:
            self._lost_lives.add(loss.worker.incarnation)

    async def _follow(self, former: Place, loss: Loss, places: AsyncExitStack) -> Place:
        """A place for the next attempt: granted, or waiting. Raises the loss's error when there can be none."""
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
        rest = self._rest(new_attempt_id())
        ticket = dataclasses.replace(
            former.ticket,
            attempt_id=rest.attempt_id,
            prompt_tokens=len(rest.token_ids),
            max_tokens=rest.stop.max_tokens - rest.num_output_tokens,
            num_choices=len(rest.choices),
            max_wait_s=min(self._course.queue_timeout_s, self._course.remaining_s()),
            avoids=avoids,
            # By now some worker may have the prompt.
            cached=self._deployment.prefixes.cached_tokens(self._course.prefix_names, queue.views),
        )
        # As for a new request, but that workers may come, the lost one's next life for one.
        refusal = await refusal_of(ticket, queue, router, self._first.fingerprint.model)
        if isinstance(refusal, OutOfRangeError):
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
                    raise no_worker(self._first.fingerprint.model, waited_s=timeout_s) from error
                raise ResourceExhaustedError(
                    f"no pair of workers had room within {timeout_s:g} s",
                    reason="QUEUE_TIMEOUT",
                    retry_after_s=_QUEUE_RETRY_AFTER_S,
                ) from error
        self._course.progress.granted()
        return grant

    async def _serve(self, grant: Grant, attempt: Attempt, place: Place, finish: Finish) -> None:
        """From the grant to the end of the calls."""
        try:
            async with self._prefill(grant, attempt) as (call, done, early):
                await self._course.take_first(done)
                has_more = done.kv is not None and bool(self._course.open_outputs(attempt))
                async with asyncio.TaskGroup() as tasks:
                    release = tasks.create_task(_release_prefill(call, place))
                    if has_more:
                        await self._decode(grant, attempt, early or self._open_decode(grant, attempt, done))
                    else:
                        await self._course.finish_outputs(attempt, None)
                    if not self._course.open_outputs(self._first):
                        await finish(self._course.cached_tokens)
                    if has_more or done.kv is None:  # else nobody takes the cache over: leaving gives it up
                        await asyncio.wait([release], timeout=_RELEASE_WAIT_S)
                    release.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from group

    @asynccontextmanager
    async def _prefill(
        self, grant: Grant, attempt: Attempt
    ) -> AsyncIterator[tuple[PrefillCall, PromptDone, DecodeCall | None]]:
        """The prefill call and its result; the call stays open, and with it the lease, for the block.

        And the decode call, where the decode worker takes the cache over as it grows. How that fares is seen when it is
        read, after the first token.
        """
        early: DecodeCall | None = None
        async with AsyncExitStack() as stack:
            with self._course.phases.enter("prefill") as span:
                span.set_attribute("baton.worker_id", grant.prefill.worker_id)
                call = self._deployment.workers.prefill(grant.prefill, attempt, self._course.remaining_s())
                await stack.enter_async_context(call)
                while not isinstance(done := await call.next(), PromptDone):
                    if isinstance(done, GrowingCache):
                        early = await stack.enter_async_context(self._open_decode(grant, attempt, done))
                    else:
                        await self._course.tell_scores(done)
            self._deployment.prefixes.learn(self._course.prefix_names, grant.prefill)
            yield call, done, early

    def _open_decode(self, grant: Grant, attempt: Attempt, cache: PromptDone | GrowingCache) -> DecodeCall:
        return self._deployment.workers.decode(grant.decode, attempt, cache, self._course.remaining_s())

    async def _decode(self, grant: Grant, attempt: Attempt, call: DecodeCall) -> None:
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
                for choice in attempt.choices:
                    if course.outputs[choice].is_over:  # with its first token, maybe by a stop string
                        await call.end_choice(choice)
                while not isinstance(event := await self._next(call, attempt), DecodeEnd):
                    if await course.take(event):
                        if not course.open_outputs(attempt):
                            return  # leaving the block cancels the call
                        await call.end_choice(event.choice)
                await course.finish_outputs(attempt, event.reason)
                await call.ended()

    async def _next(self, call: DecodeCall, attempt: Attempt) -> DecodeEvent:
        try:
            return await call.next()
        except UnavailableError:
            if self._course.open_outputs(attempt):
                raise
            return DecodeEnd(None)  # nothing was missing but the news that its blocks are free


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
