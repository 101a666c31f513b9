"""The client's side of the gateway's service, with errors that people can read."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from baton.core.errors import ResourceExhaustedError, ServingError, UnavailableError
from baton.rpc.errors import DETAILS_KEY, from_call
from baton.v1 import gateway_pb2, gateway_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from baton.v1.common_pb2 import TokenLogprobs
    from baton.v1.gateway_pb2 import Usage

    # Which part, "prompt", "answer" or "answer 2", its next token ids, and one for each of them.
    Score = Callable[[str, Iterable[int], Iterable[TokenLogprobs]], None]
    # Text of an answer and which one, counted from 0.
    Write = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """How a streamed answer came, as the client saw it."""

    usage: Usage
    time_to_first_token_s: float
    tokens_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.usage.prompt_tokens} prompt tokens, {self.usage.completion_tokens} answer tokens, "
            f"first after {self.time_to_first_token_s * 1000:.0f} ms, then {self.tokens_per_s:.1f} tokens/s"
        )


class GatewayClient:
    """Calls one gateway over one channel. Errors are ServingError with a message for people."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self._address = address
        self._stub: gateway_pb2_grpc.GatewayServiceAsyncStub = gateway_pb2_grpc.GatewayServiceStub(channel)

    async def stream(
        self, request: gateway_pb2.GenerateRequest, write: Write, score: Score | None = None
    ) -> AnswerStats:
        """Hands the answers' text to `write` as it comes. Cancelling this ends the generation.

        `score` gets the tokens and log-probabilities of prompt and answer, where the request asks for them.
        """
        started_s = time.monotonic()
        first_s = last_s = 0.0
        num_after_first = 0
        usage = gateway_pb2.Usage()
        call = self._stub.Generate(request)
        try:
            async for event in call:
                if event.HasField("delta"):
                    last_s = time.monotonic()
                    if first_s:
                        num_after_first += len(event.delta.token_ids)
                    first_s = first_s or last_s
                    choice = event.delta.choice
                    write(event.delta.text, choice)
                    if score is not None:
                        score(
                            f"answer {choice + 1}" if choice else "answer", event.delta.token_ids, event.delta.logprobs
                        )
                elif event.HasField("scored_prompt") and score is not None:
                    score("prompt", event.scored_prompt.token_ids, event.scored_prompt.logprobs)
                elif event.HasField("finished"):
                    usage = event.finished.usage
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        finally:
            call.cancel()
        return AnswerStats(
            usage=usage,
            time_to_first_token_s=max(first_s - started_s, 0.0),
            tokens_per_s=num_after_first / (last_s - first_s) if last_s > first_s else 0.0,
        )

    async def status(self, timeout_s: float) -> tuple[gateway_pb2.Model, gateway_pb2.GetStatusResponse]:
        """The one model that is served, and its queues and workers now."""
        try:
            status = await self._stub.GetStatus(gateway_pb2.GetStatusRequest(), timeout=timeout_s)
            request = gateway_pb2.GetModelRequest(name=status.model)
            return (await self._stub.GetModel(request, timeout=timeout_s)).model, status
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error

    def _explain(self, error: grpc.aio.AioRpcError) -> ServingError:
        if error.code() is grpc.StatusCode.UNAVAILABLE and DETAILS_KEY not in dict(error.trailing_metadata()):
            return UnavailableError(f"no gateway answers at {self._address}; `baton up` starts one")
        explained = from_call(error)
        if isinstance(explained, ResourceExhaustedError) and explained.retry_after_s is not None:
            return ResourceExhaustedError(
                f"{explained.message}; a retry can succeed in {explained.retry_after_s:.1f} s",
                reason=explained.reason,
                retry_after_s=explained.retry_after_s,
            )
        return explained


@asynccontextmanager
async def connect(address: str) -> AsyncGenerator[GatewayClient, None]:
    """A client for the gateway at `address` (`host:port`). Returns at once: the first call connects."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield GatewayClient(address, channel)


def printable(text: str) -> str:
    """`text` without control characters but for tab and newline: a model must not steer the reader's terminal."""
    return "".join(character for character in text if character in "\t\n" or character.isprintable())
