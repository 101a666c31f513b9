"""Plain data to the wire's messages, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.core.generation import FinishReason
from baton.core.workers import WorkerRole, WorkerState
from baton.rpc.generation import logprobs_message
from baton.v1 import common_pb2, gateway_pb2
from gateway.events import Accepted, Delta, ScoredPrompt

if TYPE_CHECKING:
    from baton.core.model import ModelFingerprint
    from baton.core.workers import WorkerView
    from gateway.events import Event, Finished
    from gateway.served_model import ServedModel

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_REASONS_READ = {value: reason for reason, value in _REASONS.items()}
_ROLES = {WorkerRole.PREFILL: common_pb2.WORKER_ROLE_PREFILL, WorkerRole.DECODE: common_pb2.WORKER_ROLE_DECODE}
_STATES = {
    WorkerState.READY: common_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: common_pb2.WORKER_STATE_DRAINING,
}


def read_finish_reason(value: int) -> FinishReason | None:
    """None for `unspecified` and for every value that this version does not know."""
    return _REASONS_READ.get(value)  # type: ignore[call-overload,no-any-return]


def fingerprint_message(fingerprint: ModelFingerprint) -> common_pb2.ModelFingerprint:
    """The wire's form of a fingerprint."""
    return common_pb2.ModelFingerprint(
        model=fingerprint.model,
        weights=fingerprint.weights,
        tokenizer=fingerprint.tokenizer,
        dtype=fingerprint.dtype,
        quantization=fingerprint.quantization,
    )


def worker_message(view: WorkerView) -> common_pb2.WorkerStatus:
    """The wire's form of a worker as the registry shows it."""
    record = view.record
    return common_pb2.WorkerStatus(
        worker_id=record.worker_id,
        incarnation=record.incarnation,
        role=_ROLES[record.role],
        state=_STATES[record.state],
        address=record.address,
        fingerprint=fingerprint_message(record.fingerprint),
        num_waiting=record.num_waiting,
        num_running=record.num_running,
        num_used_blocks=record.num_used_blocks,
        num_blocks=record.num_blocks,
        block_size_tokens=record.block_size,
        heartbeat_age_s=view.heartbeat_age_s,
        device=record.device,
        attention=record.attention,
    )


def model_message(model: ServedModel, numerics: tuple[str, str]) -> gateway_pb2.Model:
    """The wire's form of the served model; `numerics` are those of its workers, empty while none is known."""
    fingerprint = fingerprint_message(model.fingerprint)
    fingerprint.dtype, fingerprint.quantization = numerics
    return gateway_pb2.Model(
        name=model.name,
        fingerprint=fingerprint,
        max_context_tokens=model.max_context_tokens,
        default_max_tokens=model.default_max_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        has_chat_template=model.has_chat_template,
    )


def event_message(event: Event) -> gateway_pb2.GenerateResponse:
    """The wire's form of an event."""
    if isinstance(event, Accepted):
        return gateway_pb2.GenerateResponse(accepted=accepted_message(event))
    if isinstance(event, Delta):
        logprobs = [logprobs_message(each) for each in event.logprobs]
        delta = gateway_pb2.Delta(
            text=event.text,
            token_ids=event.token_ids,
            logprobs=logprobs,
            choice=event.choice,
            finish_reason=_reason(event.finish_reason),
        )
        return gateway_pb2.GenerateResponse(delta=delta)
    if isinstance(event, ScoredPrompt):
        return gateway_pb2.GenerateResponse(scored_prompt=scored_prompt_message(event))
    return gateway_pb2.GenerateResponse(finished=finished_message(event))


def scored_prompt_message(event: ScoredPrompt) -> gateway_pb2.ScoredPrompt:
    """The wire's form of a part of the prompt."""
    return gateway_pb2.ScoredPrompt(
        first_position=event.first_position,
        token_ids=event.token_ids,
        logprobs=[logprobs_message(each) for each in event.logprobs],
    )


def accepted_message(event: Accepted) -> gateway_pb2.Accepted:
    """The wire's form of an admission."""
    return gateway_pb2.Accepted(
        request_id=event.request_id,
        model=event.model,
        queue_class=event.queue_class,
        prompt_tokens=event.prompt_tokens,
        queue_position=event.queue_position,
        predicted_wait_s=event.predicted_wait_s,
    )


def finished_message(event: Finished) -> gateway_pb2.Finished:
    """The wire's form of a generation's end."""
    usage, timings = event.usage, event.timings
    return gateway_pb2.Finished(
        reason=_reason(event.reason),
        usage=gateway_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
        ),
        timings=gateway_pb2.Timings(
            tokenize_s=timings.tokenize_s,
            queue_s=timings.queue_s,
            prefill_s=timings.prefill_s,
            handover_s=timings.handover_s,
            decode_s=timings.decode_s,
            time_to_first_token_s=timings.time_to_first_token_s,
            total_s=timings.total_s,
        ),
    )


def _reason(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    return _REASONS[reason] if reason else common_pb2.FINISH_REASON_UNSPECIFIED
