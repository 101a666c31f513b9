"""Calls to workers: their streams read as events, every deviation and failure a typed error."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from baton.core.errors import ServingError, UnavailableError
from baton.rpc.generation import logprob_options_message, read_logprobs, sampling_message, structure_message
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from gateway.events import ScoredPrompt
from gateway.wire import fingerprint_message, read_finish_reason
from gateway.worker_events import DecodeEnd, GrowingCache, Handover, NewTokens, PromptDone
from gateway.worker_stream import WorkerStream, told_by

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from baton.core.generation import LogprobOptions, SamplingParams, StopRule, Structure, TokenLogprobs
    from baton.core.model import ModelFingerprint
    from baton.core.workers import WorkerRecord
    from baton.rpc.channels import ChannelPool
    from baton.v1 import common_pb2
    from gateway.worker_events import DecodeEvent

_END_WAIT_S = 1.0
# What a worker's stream may be ahead of its reader: about a hundred messages of tokens. A client that does not read
# thus holds up its own sequence in the worker; nothing gathers in between.
LOOKAHEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request, all defaults filled in.

    The last `num_output_tokens` of `token_ids` are output that earlier attempts have produced; `stop` counts them.
    `cache_salt` keeps prompts apart in prefill workers' caches. Of the request's outputs it makes those of `choices`;
    `sampling` is the first one's, from which the others' follow. `priority` counts among the tenant's own requests.
    """

    attempt_id: str
    fingerprint: ModelFingerprint
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRule
    logprobs: LogprobOptions
    structure: Structure | None
    cache_salt: str
    tenant: str = ""
    priority: int = 0
    num_output_tokens: int = 0
    choices: tuple[int, ...] = (0,)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return len(self.token_ids) - self.num_output_tokens


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
            num_choices=len(attempt.choices),
        )
        return PrefillCall(WorkerStream(stub.Prefill(request, timeout=timeout_s), worker), attempt)

    def decode(
        self, worker: WorkerRecord, attempt: Attempt, cache: PromptDone | GrowingCache, timeout_s: float
    ) -> DecodeCall:
        """A call that takes the KV cache over and generates. It begins at once, before anything is read of it."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.get(worker.address))
        num_prompt_tokens = attempt.num_prompt_tokens
        first_ids = [each.ids[0] for each in cache.first_tokens] if isinstance(cache, PromptDone) else [0]
        request = decode_pb2.DecodeRequest(
            attempt_id=attempt.attempt_id,
            fingerprint=fingerprint_message(attempt.fingerprint),
            kv=cache.kv,
            first_token_id=first_ids[0],
            other_first_token_ids=first_ids[1:],
            num_choices=len(attempt.choices),
            sampling=sampling_message(attempt.sampling),
            max_tokens=attempt.stop.max_tokens,
            stop_token_ids=sorted(attempt.stop.stop_token_ids),
            min_tokens=attempt.stop.min_tokens,
            prompt_token_ids=attempt.token_ids[:num_prompt_tokens] if attempt.sampling.penalizes_prompt else (),
            output_token_ids=attempt.token_ids[num_prompt_tokens:],
            top_logprobs=attempt.logprobs.output_top,
            structure=structure_message(attempt.structure),
            tenant=attempt.tenant,
            priority=attempt.priority,
        )
        return DecodeCall(WorkerStream(stub.Decode(request, timeout=timeout_s), worker), attempt, stub)


class _WorkerCall:
    """A stream that is cancelled when its block is left."""

    def __init__(self, stream: WorkerStream, attempt: Attempt) -> None:
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
    """One prefill: `next` until a `PromptDone`, then `released`."""

    def __init__(self, stream: WorkerStream, attempt: Attempt) -> None:
        super().__init__(stream, attempt)
        self._next_scored = 1

    async def next(self) -> ScoredPrompt | GrowingCache | PromptDone:
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

    def _checked(self, first: prefill_pb2.FirstToken) -> PromptDone:
        kv = first.kv if first.HasField("kv") else None
        if kv is not None and kv.num_tokens != len(self._attempt.token_ids):
            raise self._stream.fault(
                f"holds {kv.num_tokens} positions of a prompt of {len(self._attempt.token_ids)} tokens"
            )
        messages: list[prefill_pb2.FirstToken | prefill_pb2.OtherFirstToken] = [first, *first.other_choices]
        if len(messages) != len(self._attempt.choices):
            raise self._stream.fault(f"chose {len(messages)} first tokens, expected {len(self._attempt.choices)}")
        first_tokens = tuple(
            NewTokens(
                choice,
                (each.token_id,),
                self._logprobs(1, [each.logprobs] if each.HasField("logprobs") else []),
                read_finish_reason(each.finish_reason),
            )
            for choice, each in zip(self._attempt.choices, messages, strict=True)
        )
        if kv is not None and all(each.finish_reason is not None for each in first_tokens):
            raise self._stream.fault("kept a KV cache though the first token was the last")
        num_scored = len(self._attempt.token_ids) if self._attempt.logprobs.prompt_top is not None else 1
        if self._next_scored != num_scored:
            raise self._stream.fault(f"scored {self._next_scored} positions of the prompt, expected {num_scored}")
        return PromptDone(first_tokens=first_tokens, kv=kv, cached_tokens=first.cached_tokens)

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
    """One decode: `handover`, then `next` until a `DecodeEnd`; meanwhile `end_choice`."""

    def __init__(self, stream: WorkerStream, attempt: Attempt, stub: decode_pb2_grpc.DecodeServiceAsyncStub) -> None:
        super().__init__(stream, attempt)
        self._stub = stub
        # The first token has the position after the prompt; the decode worker begins with the one after that.
        self._next_positions = [len(attempt.token_ids) + 1] * len(attempt.choices)
        self._end_position = attempt.num_prompt_tokens + attempt.stop.max_tokens

    async def handover(self) -> Handover:
        """Waits until the worker has the KV cache."""
        kind, event = await self._event()
        if kind != "handover":
            raise self._stream.fault(f"sent {kind} before it had the KV cache")
        return Handover(transport=event.transport, num_bytes=event.num_bytes)

    async def next(self) -> DecodeEvent:
        """Waits for the next event after the handover. Nothing may be asked for after a `DecodeEnd`."""
        kind, event = await self._event()
        if kind == "tokens":
            return self._tokens(event)
        if kind == "finished":
            with suppress(UnavailableError):  # nothing is missing
                await self._stream.end()
            return DecodeEnd(read_finish_reason(event.reason))
        raise self._stream.fault("took the KV cache over twice")

    async def end_choice(self, choice: int) -> None:
        """Lets the worker free what one choice holds, whose rest nobody wants; after the handover. Waits a second."""
        request = decode_pb2.EndChoiceRequest(
            attempt_id=self._attempt.attempt_id, choice=self._attempt.choices.index(choice)
        )
        with told_by(self._stream.worker):
            await self._stub.EndChoice(request, timeout=_END_WAIT_S)

    async def _event(self) -> tuple[str, Any]:
        while (response := await self._stream.read()) is not None:
            # Events that this version does not know are passed over.
            if (kind := response.WhichOneof("event")) is not None:
                return kind, getattr(response, kind)
        raise self._stream.cut_short()

    def _tokens(self, tokens: decode_pb2.DecodedTokens) -> NewTokens:
        choices = self._attempt.choices
        if tokens.choice >= len(choices):
            raise self._stream.fault(f"sent tokens of choice {tokens.choice}, there are {len(choices)}")
        expected = self._next_positions[tokens.choice]
        if tokens.first_position != expected:
            raise self._stream.fault(f"sent tokens from position {tokens.first_position}, expected {expected}")
        self._next_positions[tokens.choice] += len(tokens.ids)
        if self._next_positions[tokens.choice] > self._end_position:
            raise self._stream.fault(f"generated more than {self._attempt.stop.max_tokens} tokens")
        return NewTokens(
            choices[tokens.choice],
            tuple(tokens.ids),
            self._logprobs(len(tokens.ids), tokens.logprobs),
            read_finish_reason(tokens.finish_reason),
        )
