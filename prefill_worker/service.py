"""PrefillService: requests to commands, events to responses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.core.generation import FinishReason
from baton.core.ids import new_attempt_id
from baton.rpc.generation import logprobs_message, read_logprob_options, read_sampling
from baton.telemetry.tracing import phase_span
from baton.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from baton.worker import requests
from baton.worker.messages import Cancel, Failed
from kv_transfer import wire
from kv_transfer.descriptor import KVDescriptor
from prefill_worker.messages import CacheGrown, PromptDone, PromptScored, Released, Started, Submit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc.aio
    from opentelemetry.trace import Tracer

    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.description import WorkerDescription
    from baton.worker.engine_client import EngineClient
    from baton.worker.life import WorkerLife
    from prefill_worker.messages import FirstToken, HeldCache, PrefillEvent
    from prefill_worker.settings import PrefillWorkerSettings

    Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


_MAX_SALT_CHARS = 128


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves gateways. An attempt's blocks are the engine's; a call that ends early cancels its attempt."""

    def __init__(
        self,
        engine: EngineClient[PrefillEvent],
        life: WorkerLife,
        description: WorkerDescription,
        settings: PrefillWorkerSettings,
        telemetry: tuple[Tracer, WorkerInstruments],
    ) -> None:
        self._engine = engine
        self._life = life
        self._description = description
        self._settings = settings
        self._tracer, self._instruments = telemetry

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See the proto. The stream ends when the attempt's blocks are free."""
        self._life.require_ready()
        submit = self._read(request)
        requests.require_room(self._engine.num_attempts, max_waiting=self._settings.max_waiting)
        attempt = self._engine.start(submit.attempt_id, submit)
        try:
            while True:
                event = await attempt.next_event()
                if not isinstance(event, CacheGrown) or event.is_new:  # its reader follows the rest
                    yield self._respond(event, submit)
                if event.is_last:
                    return
        finally:
            if not attempt.is_over:
                self._engine.control(Cancel(attempt_id=attempt.attempt_id))

    async def GetPrefillStatus(
        self, request: prefill_pb2.GetPrefillStatusRequest, context: Context
    ) -> prefill_pb2.GetPrefillStatusResponse:
        """The worker now, as its engine last reported."""
        return prefill_pb2.GetPrefillStatusResponse(
            worker=self._description.status(self._life.state, self._engine.stats)
        )

    def _read(self, request: prefill_pb2.PrefillRequest) -> Submit:
        facts = self._description.facts
        attempt_id = requests.read_attempt_id(request.attempt_id)
        requests.require_fingerprint(request.fingerprint, facts.fingerprint, worker_id=self._description.worker_id)
        token_ids = list(request.token_ids)
        if not token_ids:
            raise InvalidArgumentError("token_ids", "must not be empty")
        longest = facts.max_context_tokens - 1
        if len(token_ids) > longest:
            raise OutOfRangeError(
                "token_ids",
                f"{len(token_ids)} tokens, the model takes a prompt of at most {longest}",
                limit=longest,
                reason="PROMPT_TOO_LONG",
            )
        requests.require_in_pool("token_ids", len(token_ids), capacity_tokens=facts.capacity_tokens)
        requests.require_in_vocabulary("token_ids", token_ids, vocab_size=facts.vocab_size)
        if request.num_output_tokens >= len(token_ids):
            raise InvalidArgumentError("num_output_tokens", f"must be below the {len(token_ids)} of token_ids")
        stop = requests.read_stop(request, at_least=request.num_output_tokens + 1, vocab_size=facts.vocab_size)
        num_prompt_tokens = len(token_ids) - request.num_output_tokens
        requests.require_in_context(num_prompt_tokens, stop.max_tokens, max_context_tokens=facts.max_context_tokens)
        return Submit(
            attempt_id=attempt_id,
            lease_id=new_attempt_id(),
            token_ids=token_ids,
            sampling=read_sampling(request.sampling, default_seed=0, vocab_size=facts.vocab_size),
            stop=stop,
            logprobs=read_logprob_options(request.logprobs),
            structure=requests.read_structure(request, facts),
            num_output_tokens=request.num_output_tokens,
            cache_salt=_read_salt(request.cache_salt),
            num_choices=requests.read_num_choices(request),
        )

    def _respond(self, event: PrefillEvent, submit: Submit) -> prefill_pb2.PrefillResponse:
        """The event's message; raises the error of a failed attempt."""
        match event:
            case Started():
                phase_span(self._tracer, "prefill.queue", event.queue_s)
                return prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(queue_s=event.queue_s))
            case PromptScored():
                logprobs = [logprobs_message(each) for each in event.logprobs]
                return prefill_pb2.PrefillResponse(
                    prompt_logprobs=prefill_pb2.PromptLogprobs(first_position=event.first_position, logprobs=logprobs)
                )
            case CacheGrown():
                growing = replace(self._descriptor(event.cache, len(submit.token_ids)), is_growing=True)
                return prefill_pb2.PrefillResponse(growing_cache=wire.descriptor_to_proto(growing))
            case PromptDone():
                self._note_computed(event, submit)
                return prefill_pb2.PrefillResponse(first_token=self._first_token(event, len(submit.token_ids)))
            case Released():
                released = prefill_pb2.PrefillReleased()
                if event.outcome is not None:
                    released.outcome = wire.outcome_to_proto(event.outcome)
                return prefill_pb2.PrefillResponse(released=released)
            case Failed():
                raise event.error

    def _note_computed(self, done: PromptDone, submit: Submit) -> None:
        num_tokens = len(submit.token_ids)
        attributes = {
            "baton.num_tokens": num_tokens,
            "baton.num_cached_tokens": done.num_cached_tokens,
            "baton.num_chunks": done.num_chunks,
        }
        phase_span(self._tracer, "prefill.compute", done.compute_s, attributes=attributes)
        self._instruments.prompt_tokens.inc(num_tokens - done.num_cached_tokens)
        if self._settings.prefix_cache and submit.logprobs.prompt_top is None:
            self._instruments.prefix_cache_queried_tokens.inc(num_tokens)
            self._instruments.prefix_cache_hit_tokens.inc(done.num_cached_tokens)
        self._instruments.generation_tokens.inc(len(done.first_tokens))

    def _first_token(self, done: PromptDone, num_tokens: int) -> prefill_pb2.FirstToken:
        message = prefill_pb2.FirstToken(
            compute_s=done.compute_s,
            num_chunks=done.num_chunks,
            cached_tokens=done.num_cached_tokens,
        )
        for choice, first in enumerate(done.first_tokens):
            _write_first_token(first, message.other_choices.add() if choice else message)
        if done.cache is not None:
            descriptor = self._descriptor(done.cache, num_tokens)
            message.kv.CopyFrom(wire.descriptor_to_proto(replace(descriptor, block_ids=done.cache.block_ids)))
        return message

    def _descriptor(self, cache: HeldCache, num_tokens: int) -> KVDescriptor:
        """The cache's, without its blocks."""
        return KVDescriptor(
            lease_id=cache.lease_id,
            lease_slot=cache.slot,
            generation=cache.generation,
            worker_id=self._description.worker_id,
            incarnation=self._description.incarnation,
            address=self._description.address(),
            block_ids=(),
            num_tokens=num_tokens,
            lease_s=self._settings.lease.lease_s,
        )


def _write_first_token(first: FirstToken, message: prefill_pb2.FirstToken | prefill_pb2.OtherFirstToken) -> None:
    message.token_id = first.token_id
    if first.finish_reason is not None:
        message.finish_reason = _REASONS[first.finish_reason]
    if first.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_message(first.logprobs))


def _read_salt(salt: str) -> str:
    if len(salt) > _MAX_SALT_CHARS:
        raise InvalidArgumentError("cache_salt", f"must have at most {_MAX_SALT_CHARS} characters, has {len(salt)}")
    return salt
