"""Calls to workers: their streams read as plain data, every deviation and failure a typed error."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc

from baton.core.errors import (
    DeadlineExceededError,
    InternalError,
    ResourceExhaustedError,
    ServingError,
    UnavailableError,
)
from baton.rpc.errors import from_call
from baton.rpc.generation import logprob_options_message, read_logprobs, sampling_message, structure_message
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from gateway.events import ScoredPrompt
from gateway.wire import fingerprint_message, read_finish_reason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from baton.core.generation import (
        FinishReason,
        LogprobOptions,
        SamplingParams,
        StopRule,
        Structure,
        TokenLogprobs,
    )
    from baton.core.model import ModelFingerprint
    from baton.core.workers import WorkerRecord
    from baton.rpc.channels import ChannelPool
    from baton.v1 import common_pb2, kv_transfer_pb2

_END_WAIT_S = 1.0
# What a worker's stream may be ahead of its reader: about a hundred messages of tokens. A client that does not read
# thus holds up its own sequence in the worker; nothing gathers in between.
LOOKAHEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request, all defaults filled in.

    The last `num_output_tokens` of `token_ids` are output that earlier attempts have produced; `stop` counts them.
    `cache_salt` keeps prompts apart in prefill workers' caches.
    """

    attempt_id: str
    fingerprint: ModelFingerprint
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    logprobs: LogprobOptions
    structure: Structure | None
    cache_salt: str
    num_output_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return len(self.token_ids) - self.num_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """A prefill's result. `kv` goes to the decode worker as it is; None when the first token was the last."""

    token_id: int
    kv: kv_transfer_pb2.KvDescriptor | None
    finish_reason: FinishReason | None
    cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GrowingCache:
    """The first chunk of a longer prompt is computed: `kv` goes to the decode worker, which copies it as it grows."""

    kv: kv_transfer_pb2.KvDescriptor


@dataclass(frozen=True, slots=True)
class Handover:
    """The decode worker has the KV cache."""

    transport: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens in order, the next positions of the sequence; `logprobs` for each, or none."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class DecodeEnd:
    """The generation ended by a token or by its length."""

    reason: FinishReason | None


DecodeEvent: TypeAlias = NewTokens | DecodeEnd


class WorkerCalls:
    """Opens calls to workers. Each is an asynchronous context: leaving it cancels a call that has not ended."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels

    def prefill(self, worker: WorkerRecord, attempt: Attempt, timeout_s: float) -> PrefillCall:
        """A call that computes the prompt."""
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channels.get(worker.address))
        request = prefill_pb2.PrefillRequest(
            attempt_id=attempt.attempt_id,
            fingerprint=fingerprint_message(attempt.fingerprint),
            token_ids=attempt.token_ids,
            sampling=sampling_message(attempt.sampling),
            max_tokens=attempt.stop.max_tokens,
            stop_token_ids=sorted(attempt.stop.stop_token_ids),
            min_tokens=attempt.stop.min_tokens,
            logprobs=logprob_options_message(attempt.logprobs),
            structure=structure_message(attempt.structure),
            num_output_tokens=attempt.num_output_tokens,
            cache_salt=attempt.cache_salt,
        )
        return PrefillCall(_WorkerStream(stub.Prefill(request, timeout=timeout_s), worker), attempt)

    def decode(
        self, worker: WorkerRecord, attempt: Attempt, cache: FirstToken | GrowingCache, timeout_s: float
    ) -> DecodeCall:
        """A call that takes the KV cache over and generates. It begins at once, before anything is read of it."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.get(worker.address))
        num_prompt_tokens = attempt.num_prompt_tokens
        request = decode_pb2.DecodeRequest(
            attempt_id=attempt.attempt_id,
            fingerprint=fingerprint_message(attempt.fingerprint),
            kv=cache.kv,
            first_token_id=cache.token_id if isinstance(cache, FirstToken) else 0,
            sampling=sampling_message(attempt.sampling),
            max_tokens=attempt.stop.max_tokens,
            stop_token_ids=sorted(attempt.stop.stop_token_ids),
            min_tokens=attempt.stop.min_tokens,
            prompt_token_ids=attempt.token_ids[:num_prompt_tokens] if attempt.sampling.penalizes_prompt else (),
            output_token_ids=attempt.token_ids[num_prompt_tokens:],
            top_logprobs=attempt.logprobs.output_top,
            structure=structure_message(attempt.structure),
        )
        return DecodeCall(_WorkerStream(stub.Decode(request, timeout=timeout_s), worker), attempt)


class _WorkerStream:
    """One response stream of one worker."""

    def __init__(self, call: Any, worker: WorkerRecord) -> None:
        self._call = call
        self._worker = worker

    async def read(self) -> Any:
        """The next response; None at a good end. A ServingError when the worker failed, refused or vanished."""
        with _told_by(self._worker):
            response = await self._call.read()
        return None if response is grpc.aio.EOF else response

    async def end(self) -> None:
        """Reads what is left, so that the call ends with its own status and not with our cancellation."""
        while await self.read() is not None:
            pass

    def fault(self, description: str) -> InternalError:
        """The error for a stream that breaks the contract."""
        return InternalError(
            f"{_name(self._worker)} {description}",
            reason="WORKER_PROTOCOL",
            metadata={"worker_id": self._worker.worker_id},
        )

    def cut_short(self) -> UnavailableError:
        """The error for a stream that ended before its last event."""
        return UnavailableError(
            f"{_name(self._worker)} ended its stream too early",
            reason="WORKER_LOST",
            metadata={"worker_id": self._worker.worker_id},
        )

    def cancel(self) -> None:
        """Cancels the call; without effect when it has ended."""
        self._call.cancel()


class _WorkerCall:
    """A stream that is cancelled when its block is left."""

    def __init__(self, stream: _WorkerStream, attempt: Attempt) -> None:
        self._stream = stream
        self._attempt = attempt

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.cancel()

    def _logprobs(self, num_tokens: int, messages: Sequence[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        num_expected = 0 if self._attempt.logprobs.output_top is None else num_tokens
        if len(messages) != num_expected:
            raise self._stream.fault(f"sent log-probabilities of {len(messages)} tokens, expected {num_expected}")
        return tuple(map(read_logprobs, messages))

    async def ended(self) -> None:
        """After the last event: lets the call end with its own status, for leaving the block would cancel it.

        Raises nothing, for the result is here already. Waits a second at most.
        """
        with suppress(TimeoutError, ServingError):
            async with asyncio.timeout(_END_WAIT_S):
                while await self._stream.read() is not None:
                    pass


class PrefillCall(_WorkerCall):
    """One prefill: `next` until a `FirstToken`, then `released`."""

    def __init__(self, stream: _WorkerStream, attempt: Attempt) -> None:
        super().__init__(stream, attempt)
        self._next_scored = 1

    async def next(self) -> ScoredPrompt | GrowingCache | FirstToken:
        """Waits for the next part of the prompt that was scored, its first chunk, or the end of its computation."""
        while (response := await self._stream.read()) is not None:
            # Events that this version does not know are passed over.
            if response.WhichOneof("event") == "first_token":
                return self._checked(response.first_token)
            if response.WhichOneof("event") == "prompt_logprobs":
                return self._scored(response.prompt_logprobs)
            if response.WhichOneof("event") == "growing_cache":
                return GrowingCache(response.growing_cache)
            if response.WhichOneof("event") == "released":
                raise self._stream.fault("released the KV cache before the first token")
        raise self._stream.cut_short()

    async def released(self) -> None:
        """Waits until the worker's blocks are free and the call has ended."""
        await self._stream.end()

    def _checked(self, first: prefill_pb2.FirstToken) -> FirstToken:
        kv = first.kv if first.HasField("kv") else None
        if kv is not None and kv.num_tokens != len(self._attempt.token_ids):
            raise self._stream.fault(
                f"holds {kv.num_tokens} positions of a prompt of {len(self._attempt.token_ids)} tokens"
            )
        reason = read_finish_reason(first.finish_reason)
        if kv is not None and reason is not None:
            raise self._stream.fault("kept a KV cache though the first token was the last")
        num_scored = len(self._attempt.token_ids) if self._attempt.logprobs.prompt_top is not None else 1
        if self._next_scored != num_scored:
            raise self._stream.fault(f"scored {self._next_scored} positions of the prompt, expected {num_scored}")
        return FirstToken(
            token_id=first.token_id,
            kv=kv,
            finish_reason=reason,
            cached_tokens=first.cached_tokens,
            logprobs=self._logprobs(1, [first.logprobs] if first.HasField("logprobs") else []),
        )

    def _scored(self, scored: prefill_pb2.PromptLogprobs) -> ScoredPrompt:
        first, end = self._next_scored, self._next_scored + len(scored.logprobs)
        if scored.first_position != first or end > len(self._attempt.token_ids):
            raise self._stream.fault(f"scored positions {scored.first_position} to {end}, expected {first} on")
        self._next_scored = end
        return ScoredPrompt(
            first_position=first,
            token_ids=self._attempt.token_ids[first:end],
            logprobs=tuple(map(read_logprobs, scored.logprobs)),
        )


class DecodeCall(_WorkerCall):
    """One decode: `handover`, then `next` until a `DecodeEnd`."""

    def __init__(self, stream: _WorkerStream, attempt: Attempt) -> None:
        super().__init__(stream, attempt)
        # The first token has the position after the prompt; the decode worker begins with the one after that.
        self._next_position = len(attempt.token_ids) + 1
        self._end_position = attempt.num_prompt_tokens + attempt.stop.max_tokens
        self._end: DecodeEnd | None = None

    async def handover(self) -> Handover:
        """Waits until the worker has the KV cache."""
        kind, event = await self._event()
        if kind != "handover":
            raise self._stream.fault(f"sent {kind} before it had the KV cache")
        return Handover(transport=event.transport, num_bytes=event.num_bytes)

    async def next(self) -> DecodeEvent:
        """Waits for the next event after the handover. Nothing may be asked for after a `DecodeEnd`."""
        try:
            kind, event = await self._event()
            if kind == "tokens":
                return self._tokens(event)
            if kind == "finished":
                self._end = DecodeEnd(read_finish_reason(event.reason))
                await self._stream.end()
                return self._end
        except UnavailableError:
            if self._end is not None:  # nothing was missing but the news that its blocks are free
                return self._end
            raise
        raise self._stream.fault("took the KV cache over twice")

    async def _event(self) -> tuple[str, Any]:
        while (response := await self._stream.read()) is not None:
            # Events that this version does not know are passed over.
            if (kind := response.WhichOneof("event")) is not None:
                return kind, getattr(response, kind)
        raise self._stream.cut_short()

    def _tokens(self, tokens: decode_pb2.DecodedTokens) -> NewTokens:
        if tokens.first_position != self._next_position:
            raise self._stream.fault(
                f"sent tokens from position {tokens.first_position}, expected {self._next_position}"
            )
        self._next_position += len(tokens.ids)
        if self._next_position > self._end_position:
            raise self._stream.fault(f"generated more than {self._attempt.stop.max_tokens} tokens")
        if (reason := read_finish_reason(tokens.finish_reason)) is not None:
            self._end = DecodeEnd(reason)
        return NewTokens(tuple(tokens.ids), self._logprobs(len(tokens.ids), tokens.logprobs))


@contextmanager
def _told_by(worker: WorkerRecord) -> Iterator[None]:
    """Turns the failure of a call into an error that the client of the gateway can use."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _seen_by_client(from_call(error), worker) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc.aio raises this for a call that was ended by the other side, or by its closed channel.
        raise _lost(worker, "cancelled the call") from error


def _seen_by_client(error: ServingError, worker: WorkerRecord) -> ServingError:
    """A worker's refusal is not the client's fault: its request was valid, and another try may meet another worker."""
    if isinstance(error, DeadlineExceededError):
        return DeadlineExceededError(f"{_name(worker)}: {error.message}", reason=error.reason)
    if isinstance(error, ResourceExhaustedError):
        return ResourceExhaustedError(
            f"{_name(worker)}: {error.message}",
            reason=error.reason,
            retry_after_s=error.retry_after_s,
            metadata=error.metadata,
        )
    if isinstance(error, InternalError):
        return InternalError(
            f"{_name(worker)}: {error.message}", reason=error.reason, metadata={"worker_id": worker.worker_id}
        )
    return _lost(worker, error.message, reason=error.reason)


def _lost(worker: WorkerRecord, message: str, *, reason: str = "") -> UnavailableError:
    return UnavailableError(
        f"{_name(worker)}: {message}",
        reason="WORKER_LOST",
        metadata={"worker_id": worker.worker_id, **({"worker_reason": reason} if reason else {})},
    )


def _name(worker: WorkerRecord) -> str:
    return f"{worker.role.value} worker {worker.worker_id}"
