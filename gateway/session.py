"""One request's way through the system.

    tokenize -> admit to a queue -> wait for a pair of workers -> prefill, first token -> hand over -> decode

What a request holds lies in nested blocks: its place in the queue (with the credit of the granted pair) around the
prefill call around the decode call. However it ends (finished, failed, cancelled, out of time), the blocks are
left from the inside out: calls are cancelled first, credit goes back after them.

A cancelled worker frees the request's blocks at its next step, some milliseconds after the credit went back; a
request that is granted in between waits that long inside the worker.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry.trace import Status, StatusCode, get_current_span

from baton.core.errors import (
    DeadlineExceededError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServingError,
    UnavailableError,
)
from baton.core.generation import FinishReason
from baton.core.ids import new_attempt_id, new_request_id
from baton.core.workers import Ticket
from baton.telemetry.tracing import (
    ATTEMPT_ID,
    OPERATION_NAME,
    QUEUE_CLASS,
    REQUEST_ID,
    REQUEST_MAX_TOKENS,
    REQUEST_MODEL,
    RESPONSE_FINISH_REASONS,
    USAGE_CACHED_TOKENS,
    USAGE_INPUT_TOKENS,
    USAGE_OUTPUT_TOKENS,
)
from gateway.events import Accepted, Delta, Event, Finished, Usage
from gateway.output import Output
from gateway.stop_strings import StopStringMatcher
from gateway.validation import ChatPrompt, TextPrompt
from gateway.worker_calls import Attempt, DecodeEnd, FirstToken

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from opentelemetry.trace import Span, Tracer

    from baton.coordination.place import Place
    from baton.coordination.queue import AdmissionQueue
    from baton.core.generation import StopRule
    from baton.core.workers import Grant
    from gateway.caller import Caller
    from gateway.classes import QueueClass, QueueClasses
    from gateway.progress import Progress
    from gateway.routing import Router
    from gateway.served_model import ServedModel
    from gateway.tokenization import TokenizerPool
    from gateway.validation import GenerationRequest
    from gateway.worker_calls import PrefillCall, WorkerCalls

_log = logging.getLogger(__name__)

Emit: TypeAlias = "Callable[[Event], Awaitable[None]]"

# How long a finished request waits to see the prefill worker's blocks free, so that credit follows the free.
_RELEASE_WAIT_S = 2.0
# After a full queue wait, the load is not gone in an instant.
_QUEUE_RETRY_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionServices:
    """What every session uses and none owns."""

    model: ServedModel
    tokenizer: TokenizerPool
    queue: AdmissionQueue
    router: Router
    workers: WorkerCalls
    tracer: Tracer
    classes: QueueClasses


class Session:
    """One request, from validated input to its last event. `run` is called once."""

    def __init__(
        self, services: SessionServices, request: GenerationRequest, progress: Progress, caller: Caller
    ) -> None:
        self._services = services
        self._request = request
        self._progress = progress
        self._tenant = caller.tenant
        self._timeout_s = caller.timeout_s
        self._output = Output(
            services.tokenizer.new_detokenizer(),
            StopStringMatcher(request.stop_strings),
            request.stop_token_ids,
            min_tokens=request.min_tokens,
        )
        self._phase_name = "arrival"
        self._is_finished = False
        self._prompt_tokens = 0

    async def run(self, emit: Emit) -> None:
        """Serves the request; returns after its last event, or raises a ServingError.

        `emit` may wait for a slow client: the worker's stream is not read meanwhile, so no more than one event is
        held here. Cancelling this ends the generation everywhere.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._serve(emit, limit)
        except TimeoutError as error:
            if not self._is_finished:
                raise DeadlineExceededError(
                    f"the request's {self._timeout_s:.3g} s were over in {self._phase_name}"
                ) from error
        except BaseExceptionGroup as group:
            raise _cause(group) from group

    async def _serve(self, emit: Emit, limit: asyncio.Timeout) -> None:
        token_ids = await self._tokenize()
        stop = self._request.stop_rule(len(token_ids), self._services.model)
        queue_class = self._services.classes.classify(len(token_ids))
        self._shorten(limit, queue_class)
        ticket = self._ticket(queue_class, len(token_ids), stop)
        self._require_workers(ticket)
        self._describe(ticket)
        async with self._services.queue.admit(ticket) as place:
            self._progress.admitted(ticket.queue_class, ticket.prompt_tokens)
            await emit(self._accepted(ticket, place))
            await self._echo(emit)
            grant = await self._wait_for_workers(place, queue_class.queue_timeout_s)
            attempt = Attempt(
                attempt_id=ticket.attempt_id,
                fingerprint=self._services.model.fingerprint,
                token_ids=token_ids,
                sampling=self._request.sampling,
                logprobs=self._request.logprobs,
                structure=self._request.structure,
                stop=stop,
            )
            async with self._prefill(grant, attempt, emit) as (call, first):
                await emit(self._output.push((first.token_id,), first.logprobs))
                has_more = first.kv is not None and not self._output.is_stopped
                async with asyncio.TaskGroup() as tasks:
                    release = tasks.create_task(_release_prefill(call, place))
                    reason = await self._decode(grant, attempt, first, emit) if has_more else first.finish_reason
                    await self._finish(reason, first, emit)
                    if has_more or first.kv is None:  # else nobody takes the cache over: leaving gives it up
                        await asyncio.wait([release], timeout=_RELEASE_WAIT_S)
                    release.cancel()

    async def _tokenize(self) -> tuple[int, ...]:
        prompt = self._request.prompt
        with self._phase("tokenize"):
            if self._request.structure is not None:
                await self._services.tokenizer.check_structure(self._request.structure)
            if isinstance(prompt, TextPrompt):
                token_ids = tuple(await self._services.tokenizer.encode(prompt.text))
            elif isinstance(prompt, ChatPrompt):
                token_ids = tuple(await self._services.tokenizer.encode_chat(prompt.messages))
            else:
                token_ids = prompt.ids
        self._progress.tokenized()
        self._prompt_tokens = len(token_ids)
        return token_ids

    def _shorten(self, limit: asyncio.Timeout, queue_class: QueueClass) -> None:
        """Lets the request live no longer than its class allows; the time counts from its arrival."""
        if queue_class.request_timeout_s is not None and queue_class.request_timeout_s < self._timeout_s:
            self._timeout_s = queue_class.request_timeout_s
            limit.reschedule(asyncio.get_running_loop().time() + self._remaining_s())

    def _ticket(self, queue_class: QueueClass, prompt_tokens: int, stop: StopRule) -> Ticket:
        return Ticket(
            attempt_id=new_attempt_id(),
            request_id=self._request.request_id or new_request_id(),
            queue_class=queue_class.name,
            prompt_tokens=prompt_tokens,
            max_tokens=stop.max_tokens,
            tenant=self._tenant,
            priority=self._request.priority,
            max_wait_s=min(queue_class.queue_timeout_s, self._remaining_s()),
        )

    def _require_workers(self, ticket: Ticket) -> None:
        """Refuses at once what no wait can serve: no pair of workers at all, or none that could ever hold it."""
        queue, router = self._services.queue, self._services.router
        if not queue.is_available:
            return  # admission says so itself
        if not router.has_pair(queue.views):
            raise _no_worker(self._services.model.name)
        room = router.most_output_tokens(ticket.prompt_tokens, queue.views)
        if ticket.max_tokens > room:
            raise OutOfRangeError(
                "stop.max_tokens",
                f"{ticket.max_tokens} is over the {room} for which the workers have memory after a prompt of"
                f" {ticket.prompt_tokens} tokens",
                limit=room,
            )

    def _accepted(self, ticket: Ticket, place: Place) -> Accepted:
        return Accepted(
            request_id=ticket.request_id,
            model=self._services.model.name,
            queue_class=ticket.queue_class,
            prompt_tokens=ticket.prompt_tokens,
            queue_position=place.position,
            predicted_wait_s=place.predicted_wait_s,
        )

    async def _wait_for_workers(self, place: Place, timeout_s: float) -> Grant:
        with self._phase("queue"):
            try:
                async with asyncio.timeout(timeout_s):
                    grant = await place.granted()
            except TimeoutError as error:
                if not self._services.router.has_pair(self._services.queue.views):
                    raise _no_worker(self._services.model.name) from error
                raise ResourceExhaustedError(
                    f"no pair of workers had room within {timeout_s:g} s",
                    reason="QUEUE_TIMEOUT",
                    retry_after_s=_QUEUE_RETRY_AFTER_S,
                ) from error
        self._progress.granted()
        return grant

    @asynccontextmanager
    async def _prefill(
        self, grant: Grant, attempt: Attempt, emit: Emit
    ) -> AsyncIterator[tuple[PrefillCall, FirstToken]]:
        """The prefill call and its first token; the call stays open, and with it the lease, for the block."""
        async with AsyncExitStack() as stack:
            with self._phase("prefill") as span:
                span.set_attribute("baton.worker_id", grant.prefill.worker_id)
                call = self._services.workers.prefill(grant.prefill, attempt, self._remaining_s())
                await stack.enter_async_context(call)
                while not isinstance(first := await call.next(), FirstToken):
                    await emit(first)
            self._progress.first_token()
            yield call, first

    async def _echo(self, emit: Emit) -> None:
        prompt = self._request.prompt
        if self._request.echo and not isinstance(prompt, ChatPrompt):
            if isinstance(prompt, TextPrompt):
                await emit(Delta(prompt.text))
            else:
                await emit(Delta(await self._services.tokenizer.decode(prompt.ids)))

    async def _decode(self, grant: Grant, attempt: Attempt, first: FirstToken, emit: Emit) -> FinishReason | None:
        with self._phase("decode") as span:
            span.set_attribute("baton.worker_id", grant.decode.worker_id)
            async with self._services.workers.decode(grant.decode, attempt, first, self._remaining_s()) as call:
                with self._phase("handover") as handover_span:
                    handover = await call.handover()
                    handover_span.set_attribute("baton.handover.transport", handover.transport)
                    handover_span.set_attribute("baton.handover.num_bytes", handover.num_bytes)
                self._progress.handed_over()
                self._phase_name = "decode"
                while not isinstance(event := await call.next(), DecodeEnd):
                    delta = self._output.push(event.ids, event.logprobs)
                    self._progress.tokens(len(delta.token_ids))
                    await emit(delta)
                    if self._output.is_stopped:
                        return FinishReason.STOP  # leaving the block cancels the call
                await call.ended()
                return event.reason

    async def _finish(self, reason: FinishReason | None, first: FirstToken, emit: Emit) -> None:
        tail = self._output.finish()
        if tail.text:
            await emit(tail)
        if self._output.is_stopped:
            reason = FinishReason.STOP
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._output.num_tokens,
            cached_prompt_tokens=first.cached_tokens,
        )
        span = get_current_span()
        span.set_attribute(USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        span.set_attribute(USAGE_CACHED_TOKENS, usage.cached_prompt_tokens)
        span.set_attribute(RESPONSE_FINISH_REASONS, [reason.value if reason else "unspecified"])
        self._is_finished = True
        await emit(Finished(reason=reason, usage=usage, timings=self._progress.finished(reason)))

    def _describe(self, ticket: Ticket) -> None:
        """Attributes of the server's span."""
        span = get_current_span()
        span.set_attribute(OPERATION_NAME, "text_completion")
        span.set_attribute(REQUEST_MODEL, self._services.model.name)
        span.set_attribute(REQUEST_MAX_TOKENS, ticket.max_tokens)
        span.set_attribute(USAGE_INPUT_TOKENS, ticket.prompt_tokens)
        span.set_attribute(REQUEST_ID, ticket.request_id)
        span.set_attribute(ATTEMPT_ID, ticket.attempt_id)
        span.set_attribute(QUEUE_CLASS, ticket.queue_class)

    def _remaining_s(self) -> float:
        return max(0.0, self._timeout_s - self._progress.age_s())

    @contextmanager
    def _phase(self, name: str) -> Iterator[Span]:
        """A span around one phase. Error messages stay out of it: they may quote what a client sent."""
        self._phase_name = name
        tracer = self._services.tracer
        with tracer.start_as_current_span(
            f"gateway.{name}", record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR))
                span.set_attribute("error.type", type(error).__name__)
                raise


async def _release_prefill(call: PrefillCall, place: Place) -> None:
    """Gives the prefill worker's credit back when its blocks are free."""
    try:
        await call.released()
    except ServingError as error:
        # The decode worker notices by itself if it still needed the blocks; then its stream carries the error.
        _log.warning("prefill worker failed after the first token: %s", error.reason)
    await place.release_prefill()
    await call.ended()


def _no_worker(model: str) -> UnavailableError:
    return UnavailableError(f"no pair of workers serves {model!r} now", reason="NO_WORKER")


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that a task group wrapped; the first of several."""
    error = group.exceptions[0]
    return _cause(error) if isinstance(error, BaseExceptionGroup) else error
