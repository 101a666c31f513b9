"""DecodeService: requests to commands, events to responses, and the lease on the source's blocks in between."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from baton.core.errors import AlreadyExistsError, InvalidArgumentError, OutOfRangeError, ServingError
from baton.core.generation import FinishReason
from baton.core.model import blocks_of_choices
from baton.rpc.generation import logprobs_message, read_sampling, read_top
from baton.telemetry.tracing import phase_span
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from baton.worker import requests
from baton.worker.messages import Cancel, Failed
from decode_worker.messages import Accept, EndChoice, Finished, Grow, HandedOver
from decode_worker.pacing import Pacer
from decode_worker.token_stream import TokenRun, in_runs
from kv_transfer import wire
from kv_transfer.lease import LeaseOutcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import grpc.aio
    from opentelemetry.trace import Tracer

    from baton.core.generation import SamplingParams
    from baton.telemetry.instruments import WorkerInstruments
    from baton.worker.description import WorkerDescription
    from baton.worker.engine_client import Attempt, EngineClient
    from baton.worker.life import WorkerLife
    from decode_worker.messages import DecodeEvent
    from kv_transfer.client import HeldLease, PeerDirectory
    from kv_transfer.descriptor import Growth, KVDescriptor

    Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Most attempts inside the worker, and most tokens of one that its reader has not taken."""

    max_waiting: int
    max_unread_tokens: int


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Serves gateways. Whatever becomes of a call, the source of its KV cache hears that it may have its own back."""

    def __init__(
        self,
        engine: EngineClient[DecodeEvent],
        peers: PeerDirectory,
        worker: tuple[WorkerLife, WorkerDescription],
        telemetry: tuple[Tracer, WorkerInstruments],
        *,
        limits: DecodeLimits,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._life, self._description = worker
        self._tracer, self._instruments = telemetry
        self._max_waiting = limits.max_waiting
        self._pacer = Pacer(engine.control, max_unread_tokens=limits.max_unread_tokens)
        engine.add_observer(self._pacer.observe)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """See the proto. `finished` is sent when the sequence's blocks are free."""
        kv = wire.descriptor_from_proto(request.kv)
        if self._engine.has_attempt(request.attempt_id):  # its lease is the other call's, so it is left alone
            raise AlreadyExistsError(f"attempt {request.attempt_id} runs already", reason="ATTEMPT_EXISTS")
        accept = self._admit(request, kv)
        attempt: Attempt[DecodeEvent] | None = None
        following = ExitStack()
        try:
            async with self._peers.hold(kv) as lease:
                take_as_read = following.enter_context(self._pacer.follow(accept.attempt_id))
                attempt = self._start(accept, lease)
                handed_over = await attempt.next_event()
                if isinstance(handed_over, HandedOver):
                    lease.consumed()
            yield self._respond(handed_over)
            async for item in in_runs(attempt):
                yield self._respond(item)  # waits while the reader has no room for it
                if isinstance(item, TokenRun):
                    take_as_read(len(item.token_ids))
        finally:
            following.close()
            if attempt is not None and not attempt.is_over:
                self._engine.control(Cancel(attempt_id=accept.attempt_id))

    def _start(self, accept: Accept, lease: HeldLease) -> Attempt[DecodeEvent]:
        assert lease.pool is not None, "its peer is known"
        accept = replace(accept, source_block_size=lease.pool.layout.block_size)
        attempt = self._engine.start(accept.attempt_id, accept)

        def tell(growth: Growth) -> None:
            if growth.first_token_ids:
                self._require_first_tokens(growth.first_token_ids, accept.num_choices)
            self._engine.control(Grow(attempt_id=accept.attempt_id, growth=growth))

        if accept.kv.is_growing:
            lease.follow(tell)
        return attempt

    async def EndChoice(self, request: decode_pb2.EndChoiceRequest, context: Context) -> decode_pb2.EndChoiceResponse:
        """Tells the engine, whose next step is without the choice."""
        self._engine.control(EndChoice(attempt_id=request.attempt_id, choice=request.choice))
        return decode_pb2.EndChoiceResponse()

    async def GetDecodeStatus(
        self, request: decode_pb2.GetDecodeStatusRequest, context: Context
    ) -> decode_pb2.GetDecodeStatusResponse:
        """The worker now, as its engine last reported."""
        return decode_pb2.GetDecodeStatusResponse(worker=self._description.status(self._life.state, self._engine.stats))

    def _admit(self, request: decode_pb2.DecodeRequest, kv: KVDescriptor) -> Accept:
        """The request as a command. When it is refused the lease is released as abandoned."""
        try:
            self._life.require_ready()
            accept = self._read(request, kv)
            requests.require_room(self._engine.num_attempts, max_waiting=self._max_waiting)
        except ServingError:
            self._peers.release(kv, LeaseOutcome.ABANDONED)
            raise
        return accept

    def _read(self, request: decode_pb2.DecodeRequest, kv: KVDescriptor) -> Accept:
        facts = self._description.facts
        attempt_id = requests.read_attempt_id(request.attempt_id)
        requests.require_fingerprint(request.fingerprint, facts.fingerprint, worker_id=self._description.worker_id)
        num_choices = requests.read_num_choices(request)
        first_token_ids = () if kv.is_growing else (request.first_token_id, *request.other_first_token_ids)
        if first_token_ids:
            self._require_first_tokens(first_token_ids, num_choices)
        num_output = len(request.output_token_ids)
        if num_output >= kv.num_tokens:
            raise InvalidArgumentError("output_token_ids", f"must be fewer than the {kv.num_tokens} of kv.num_tokens")
        if num_output:
            requests.require_in_vocabulary("output_token_ids", request.output_token_ids, vocab_size=facts.vocab_size)
        stop = requests.read_stop(request, at_least=num_output + 2, vocab_size=facts.vocab_size)
        sampling = read_sampling(request.sampling, default_seed=0, vocab_size=facts.vocab_size)
        num_prompt = kv.num_tokens - num_output
        requests.require_in_context(num_prompt, stop.max_tokens, max_context_tokens=facts.max_context_tokens)
        self._require_seats(num_choices)
        block_size = facts.layout.block_size
        num_blocks = blocks_of_choices(
            kv.num_tokens, num_prompt + stop.max_tokens - kv.num_tokens, num_choices, block_size
        )
        requests.require_in_pool("max_tokens", num_blocks * block_size, capacity_tokens=facts.capacity_tokens)
        return Accept(
            attempt_id=attempt_id,
            kv=kv,
            first_token_ids=first_token_ids,
            source_block_size=facts.layout.block_size,
            sampling=sampling,
            stop=stop,
            prompt_ids=_read_prompt(request, sampling, vocab_size=facts.vocab_size),
            output_ids=tuple(request.output_token_ids),
            structure=requests.read_structure(request, facts),
            num_choices=num_choices,
            tenant=request.tenant,
            priority=request.priority,
            top_logprobs=read_top("top_logprobs", request.top_logprobs if request.HasField("top_logprobs") else None),
        )

    def _require_first_tokens(self, token_ids: Sequence[int], num_choices: int) -> None:
        if len(token_ids) != num_choices:
            raise InvalidArgumentError("num_choices", f"is {num_choices}, and there are {len(token_ids)} first tokens")
        requests.require_in_vocabulary("first_token_id", token_ids, vocab_size=self._description.facts.vocab_size)

    def _require_seats(self, num_choices: int) -> None:
        """Raises OutOfRangeError when the choices would not fit into a batch of their own."""
        limit = self._description.max_num_seqs
        if num_choices > limit:
            raise OutOfRangeError("num_choices", f"{num_choices} is over the batch's {limit}", limit=limit)

    def _respond(self, item: TokenRun | DecodeEvent) -> decode_pb2.DecodeResponse:
        """The item's message; raises the error of a failed attempt."""
        match item:
            case TokenRun():
                self._instruments.generation_tokens.inc(len(item.token_ids))
                return decode_pb2.DecodeResponse(
                    tokens=decode_pb2.DecodedTokens(
                        first_position=item.first_position,
                        ids=item.token_ids,
                        logprobs=[logprobs_message(each) for each in item.logprobs],
                        finish_reason=_REASONS[item.finish_reason]
                        if item.finish_reason
                        else common_pb2.FINISH_REASON_UNSPECIFIED,
                        choice=item.choice,
                    )
                )
            case HandedOver():
                self._note_handover(item)
                return decode_pb2.DecodeResponse(
                    handover=decode_pb2.HandoverDone(
                        transport=item.transport,
                        num_bytes=item.num_bytes,
                        wait_s=item.wait_s,
                        copy_s=item.copy_s,
                        num_parts=item.num_parts,
                    )
                )
            case Finished():
                phase_span(
                    self._tracer, "decode.generate", item.generate_s, attributes={"baton.num_steps": item.num_steps}
                )
                return decode_pb2.DecodeResponse(
                    finished=decode_pb2.DecodeFinished(reason=_REASONS[item.reason], num_steps=item.num_steps)
                )
            case Failed():
                raise item.error
        raise AssertionError(f"not an event for readers: {type(item).__name__}")

    def _note_handover(self, event: HandedOver) -> None:
        phase_span(self._tracer, "decode.wait", event.wait_s, ended_ago_s=event.copy_s)
        phase_span(
            self._tracer,
            "decode.handover",
            event.copy_s,
            attributes={
                "baton.transport": event.transport,
                "baton.num_bytes": event.num_bytes,
                "baton.num_parts": event.num_parts,
            },
        )
        self._instruments.handover_time.labels(event.transport).observe(event.copy_s)
        self._instruments.handover_bytes.labels(event.transport).inc(event.num_bytes)


def _read_prompt(request: decode_pb2.DecodeRequest, sampling: SamplingParams, *, vocab_size: int) -> tuple[int, ...]:
    """The prompt where a penalty looks at it; empty where none does."""
    num_prompt = request.kv.num_tokens - len(request.output_token_ids)
    num_expected = num_prompt if sampling.penalizes_prompt else 0
    if len(request.prompt_token_ids) != num_expected:
        raise InvalidArgumentError(
            "prompt_token_ids", f"must have {num_expected} ids, has {len(request.prompt_token_ids)}"
        )
    if num_expected:
        requests.require_in_vocabulary("prompt_token_ids", request.prompt_token_ids, vocab_size=vocab_size)
    return tuple(request.prompt_token_ids)
