"""In float32 the disaggregated system says what the reference implementation says, token for token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from baton.v1 import gateway_pb2, gateway_pb2_grpc
from tests.e2e.prompts import CHATS, TEXTS

if TYPE_CHECKING:
    from baton.v1.gateway_pb2 import CompleteResponse, GenerateRequest
    from tests.e2e.conftest import Reference, System

# As many as a block has positions, and one: every answer crosses the end of a block.
MAX_TOKENS = 17

# Some twenty prompts, one after the other.
pytestmark = pytest.mark.timeout(300)


def requests() -> list[GenerateRequest]:
    chats = [[gateway_pb2.ChatMessage(role=role, content=content) for role, content in chat] for chat in CHATS]
    made = [gateway_pb2.GenerateRequest(text=text) for text in TEXTS]
    made += [gateway_pb2.GenerateRequest(messages=chat) for chat in chats]
    for request in made:
        request.sampling.temperature = 0.0
        request.stop.max_tokens = MAX_TOKENS
    return made


def prompts(reference: Reference) -> list[list[int]]:
    """The token ids of the same prompts, by transformers' tokenizer and template."""
    made = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        made.append(
            reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    return made


@pytest.fixture(scope="module")
def answers(system: System) -> list[list[int]]:
    """What is said to each prompt alone."""
    with grpc.insecure_channel(system.address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        return [list(stub.Complete(request).token_ids) for request in requests()]


def test_tokens_equal_the_reference_one_request_at_a_time(answers: list[list[int]], reference: Reference) -> None:
    assert len(answers) >= 20
    assert len({tuple(answer) for answer in answers}) == len(answers)
    for prompt, answer in zip(prompts(reference), answers, strict=True):
        assert reference.greedy(prompt, answer) == answer
        assert len(answer) == MAX_TOKENS or answer[-1] == reference.tokenizer.eos_token_id


async def test_tokens_equal_the_reference_all_at_once(system: System, answers: list[list[int]]) -> None:
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = system.stub(channel)

        async def complete(request: GenerateRequest) -> CompleteResponse:
            return await stub.Complete(request)

        together = await asyncio.gather(*map(complete, requests()))
    assert [list(answer.token_ids) for answer in together] == answers


async def test_text_is_the_decoding_of_the_tokens(system: System, reference: Reference) -> None:
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = system.stub(channel)

        async def stream(request: GenerateRequest) -> tuple[str, list[int]]:
            text, token_ids = "", []
            async for event in stub.Generate(request):
                if event.HasField("delta"):
                    text += event.delta.text
                    token_ids += event.delta.token_ids
            return text, token_ids

        for text, token_ids in await asyncio.gather(*map(stream, requests()[:10])):
            assert text == reference.tokenizer.decode(token_ids, skip_special_tokens=True)
