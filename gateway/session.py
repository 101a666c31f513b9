"""One request's way through the system: tokenize -> admit to a queue -> attempts on workers -> finish.

What a request holds is its place in the queue, and what its attempts (`gateway.attempts`) hold within it. However it
ends (finished, failed, cancelled, out of time), all of it is given back.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.trace import get_current_span

from baton.core.errors import DeadlineExceededError
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
    RESPONSE_TIME_TO_FIRST_CHUNK,
    USAGE_CACHED_TOKENS,
    USAGE_INPUT_TOKENS,
    USAGE_OUTPUT_TOKENS,
)
from gateway.attempts import Attempts
from gateway.capacity import refusal_of
from gateway.course import Course
from gateway.events import Accepted, Delta, Finished, Usage
from gateway.output import Output
from gateway.phases import Phases
from gateway.stop_strings import StopStringMatcher
from gateway.validation import ChatPrompt, TextPrompt
from gateway.worker_calls import Attempt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Tracer

    from baton.coordination.place import Place
    from baton.core.generation import StopRule
    from gateway.attempts import Deployment
    from gateway.caller import Caller
    from gateway.classes import QueueClass, QueueClasses
    from gateway.course import Emit
    from gateway.progress import Progress
    from gateway.served_model import ServedModel
    from gateway.tokenization import TokenizerPool
    from gateway.validation import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionServices:
    """What every session uses and none owns."""

    model: ServedModel
    tokenizer: TokenizerPool
    deployment: Deployment
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
        self._outputs = [
            Output(
                services.tokenizer.new_detokenizer(),
                StopStringMatcher(request.stop_strings),
                request.stop_token_ids,
                min_tokens=request.min_tokens,
                choice=choice,
            )
            for choice in range(request.num_choices)
        ]
        self._phases = Phases(services.tracer)
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
                    f"the request's {self._timeout_s:.3g} s were over in {self._phases.name}"
                ) from error

    async def _serve(self, emit: Emit, limit: asyncio.Timeout) -> None:
        token_ids = await self._tokenize()
        stop = self._request.stop_rule(len(token_ids), self._services.model)
        prefixes, views = self._services.deployment.prefixes, self._services.deployment.queue.views
        names = prefixes.names(token_ids, self._tenant)
        # A prompt whose tokens are scored is computed whole.
        cached = {} if self._request.logprobs.prompt_top is not None else prefixes.cached_tokens(names, views)
        queue_class = self._services.classes.classify(len(token_ids) - max(cached.values(), default=0))
        self._shorten(limit, queue_class)
        ticket = self._ticket(queue_class, stop, cached)
        await self._require_workers(ticket)
        self._describe(ticket)
        first = Attempt(
            attempt_id=ticket.attempt_id,
            fingerprint=self._services.model.fingerprint,
            token_ids=token_ids,
            sampling=self._request.sampling,
            logprobs=self._request.logprobs,
            structure=self._request.structure,
            stop=stop,
            cache_salt=prefixes.salt(self._tenant),
            choices=tuple(range(self._request.num_choices)),
            tenant=self._tenant,
            priority=self._request.priority,
        )
        course = Course(
            outputs=self._outputs,
            progress=self._progress,
            phases=self._phases,
            emit=emit,
            remaining_s=self._remaining_s,
            queue_timeout_s=queue_class.queue_timeout_s,
            prefix_names=names,
        )

        async def finish(cached_tokens: int) -> None:
            await self._finish(cached_tokens, emit)

        async with self._services.deployment.queue.admit(ticket) as place:
            self._progress.admitted(ticket.queue_class, ticket.prompt_tokens)
            await emit(self._accepted(ticket, place))
            await self._echo(emit)
            await Attempts(self._services.deployment, course, first).run(place, finish)

    async def _tokenize(self) -> tuple[int, ...]:
        prompt = self._request.prompt
        with self._phases.enter("tokenize"):
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

    def _ticket(self, queue_class: QueueClass, stop: StopRule, cached: Mapping[str, int]) -> Ticket:
        return Ticket(
            attempt_id=new_attempt_id(),
            request_id=self._request.request_id or new_request_id(),
            queue_class=queue_class.name,
            prompt_tokens=self._prompt_tokens,
            max_tokens=stop.max_tokens,
            num_choices=self._request.num_choices,
            tenant=self._tenant,
            priority=self._request.priority,
            max_wait_s=min(queue_class.queue_timeout_s, self._remaining_s()),
            cached=cached,
        )

    async def _require_workers(self, ticket: Ticket) -> None:
        """Refuses at once what no wait can serve: no pair of workers at all, or none that could ever hold it."""
        deployment = self._services.deployment
        refusal = await refusal_of(ticket, deployment.queue, deployment.router, self._services.model.name)
        if refusal is not None:
            raise refusal

    def _accepted(self, ticket: Ticket, place: Place) -> Accepted:
        return Accepted(
            request_id=ticket.request_id,
            model=self._services.model.name,
            queue_class=ticket.queue_class,
            prompt_tokens=ticket.prompt_tokens,
            queue_position=place.position,
            predicted_wait_s=place.predicted_wait_s,
        )

    async def _echo(self, emit: Emit) -> None:
        prompt = self._request.prompt
        if self._request.echo and not isinstance(prompt, ChatPrompt):
            if isinstance(prompt, TextPrompt):
                text = prompt.text
            else:
                text = await self._services.tokenizer.decode(prompt.ids)
            for output in self._outputs:
                await emit(Delta(text, choice=output.choice))

    async def _finish(self, cached_tokens: int, emit: Emit) -> None:
        reasons = [output.reason for output in self._outputs]
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(len(output.token_ids) for output in self._outputs),
            cached_prompt_tokens=cached_tokens,
        )
        span = get_current_span()
        span.set_attribute(USAGE_OUTPUT_TOKENS, usage.completion_tokens)
        span.set_attribute(USAGE_CACHED_TOKENS, usage.cached_prompt_tokens)
        span.set_attribute(RESPONSE_FINISH_REASONS, [each.value if each else "unspecified" for each in reasons])
        timings = self._progress.finished(reasons[0])
        span.set_attribute(RESPONSE_TIME_TO_FIRST_CHUNK, timings.time_to_first_token_s)
        self._is_finished = True
        await emit(Finished(reason=reasons[0], usage=usage, timings=timings))

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
