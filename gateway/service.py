"""The public service: the wire's messages in and out, nothing decided here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.core.errors import NotFoundError
from baton.v1 import gateway_pb2, gateway_pb2_grpc
from gateway.caller import read_caller
from gateway.events import Accepted, Delta, ScoredPrompt
from gateway.progress import Progress
from gateway.session import Session
from gateway.validation import (
    TextPrompt,
    validate_detokenize,
    validate_generate,
    validate_tokenize,
)
from gateway.wire import (
    accepted_message,
    event_message,
    finished_message,
    model_message,
    scored_prompt_message,
    worker_message,
)

if TYPE_CHECKING:
    import grpc

    from baton.core.clock import Clock
    from baton.telemetry.instruments import GatewayInstruments
    from gateway.course import Emit
    from gateway.events import Event
    from gateway.session import SessionServices

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSettings:
    """What the service needs to start a session, apart from what sessions use."""

    clock: Clock
    instruments: GatewayInstruments
    request_timeout_s: float
    max_choices: int


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers clients. Errors leave as ServingErrors; the server's interceptor turns them into statuses."""

    def __init__(self, services: SessionServices, settings: RequestSettings) -> None:
        self._services = services
        self._settings = settings

    async def Generate(  # type: ignore[override]  # writes by itself, so that its end is its own and not the collector's
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> None:
        """Streams a generation."""

        async def emit(event: Event) -> None:
            await context.write(event_message(event))

        await self._run(request, context, emit)

    async def Complete(self, request: gateway_pb2.GenerateRequest, context: Context) -> gateway_pb2.CompleteResponse:
        """Generates and answers once; the request's own `max_tokens` bounds what is collected."""
        response = gateway_pb2.CompleteResponse()
        texts: dict[int, list[str]] = {0: []}

        async def emit(event: Event) -> None:
            if isinstance(event, Accepted):
                response.accepted.CopyFrom(accepted_message(event))
            elif isinstance(event, Delta):
                delta = event_message(event).delta
                while len(response.other_choices) < event.choice:
                    response.other_choices.add()
                choice = response.other_choices[event.choice - 1] if event.choice else response
                texts.setdefault(event.choice, []).append(event.text)
                choice.token_ids.extend(event.token_ids)
                choice.logprobs.extend(delta.logprobs)
                if isinstance(choice, gateway_pb2.OtherChoice) and delta.finish_reason:
                    choice.reason = delta.finish_reason
            elif isinstance(event, ScoredPrompt):
                scored = scored_prompt_message(event)
                if not response.HasField("scored_prompt"):
                    response.scored_prompt.first_position = scored.first_position
                response.scored_prompt.token_ids.extend(scored.token_ids)
                response.scored_prompt.logprobs.extend(scored.logprobs)
            else:
                response.finished.CopyFrom(finished_message(event))

        await self._run(request, context, emit)
        response.text = "".join(texts.pop(0))
        for index, parts in texts.items():
            response.other_choices[index - 1].text = "".join(parts)
        return response

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        """Ids of a text or conversation."""
        prompt = validate_tokenize(request, self._services.model)
        tokenizer = self._services.tokenizer
        if isinstance(prompt, TextPrompt):
            token_ids = await tokenizer.encode(prompt.text)
        else:
            token_ids = await tokenizer.encode_chat(prompt.messages)
        return gateway_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        """Text of ids."""
        token_ids = validate_detokenize(request, self._services.model)
        text = await self._services.tokenizer.decode(token_ids, include_special_tokens=request.include_special_tokens)
        return gateway_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """The one model of this gateway."""
        return gateway_pb2.ListModelsResponse(models=[self._model()])

    async def GetModel(self, request: gateway_pb2.GetModelRequest, context: Context) -> gateway_pb2.GetModelResponse:
        """A model by its name; NOT_FOUND for another one, and for none."""
        if not request.name:
            raise NotFoundError("name: no model was named", reason="MODEL_NOT_FOUND", metadata={"field": "name"})
        self._services.model.require_name(request.name)
        return gateway_pb2.GetModelResponse(model=self._model())

    async def GetStatus(self, request: gateway_pb2.GetStatusRequest, context: Context) -> gateway_pb2.GetStatusResponse:
        """Queues and workers now; UNAVAILABLE while Redis is away."""
        self._services.model.require_name(request.model)
        queue = self._services.deployment.queue
        return gateway_pb2.GetStatusResponse(
            model=self._services.model.name,
            queues=[
                gateway_pb2.QueueStatus(
                    queue_class=status.name,
                    num_waiting=status.num_waiting,
                    waiting_tokens=status.waiting_tokens,
                    max_waiting=status.limits.max_waiting,
                    max_waiting_tokens=status.limits.max_waiting_tokens,
                    oldest_wait_s=status.oldest_wait_s,
                )
                for status in await queue.status()
            ],
            workers=[worker_message(view) for view in await queue.workers()],
            num_active=queue.num_live,
        )

    async def _run(self, request: gateway_pb2.GenerateRequest, context: Context, emit: Emit) -> None:
        progress = Progress(self._settings.clock, self._settings.instruments)
        with progress.outcome():
            generation = validate_generate(
                request, self._services.model, new_seed=secrets.randbits(64), max_choices=self._settings.max_choices
            )
            caller = read_caller(context, longest_s=self._settings.request_timeout_s)
            await Session(self._services, generation, progress, caller).run(emit)

    def _model(self) -> gateway_pb2.Model:
        deployment = self._services.deployment
        router, views = deployment.router, deployment.queue.views
        numerics = next((view.record.fingerprint.numerics for view in views if router.fits(view.record)), ("", ""))
        return model_message(self._services.model, numerics)
