"""In float32 the disaggregated system says what the reference implementation says, token for token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest
import torch
import transformers

from baton.v1 import gateway_pb2
from tests.e2e.prompts import CHATS, TEXTS

if TYPE_CHECKING:
    from pathlib import Path

    from baton.v1.gateway_pb2 import CompleteResponse, GenerateRequest
    from tests.e2e.conftest import System

MAX_TOKENS = 24

# The reference answers one prompt after the other.
pytestmark = pytest.mark.timeout(600)


def requests() -> list[GenerateRequest]:
    chats = [[gateway_pb2.ChatMessage(role=role, content=content) for role, content in chat] for chat in CHATS]
    made = [gateway_pb2.GenerateRequest(text=text) for text in TEXTS]
    made += [gateway_pb2.GenerateRequest(messages=chat) for chat in chats]
    for request in made:
        request.sampling.temperature = 0.0
        request.stop.max_tokens = MAX_TOKENS
    return made


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> list[list[int]]:
    """What transformers' own model and tokenizer make of each prompt, alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        prompts.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS
            )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def test_there_are_enough_and_varied_prompts(expected: list[list[int]]) -> None:
    assert len(expected) >= 20
    assert len({tuple(answer) for answer in expected}) == len(expected)


async def test_tokens_equal_the_reference_one_request_at_a_time(system: System, expected: list[list[int]]) -> None:
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = system.stub(channel)
        answers = [await stub.Complete(request) for request in requests()]
    assert [list(answer.token_ids) for answer in answers] == expected


async def test_tokens_equal_the_reference_all_at_once(system: System, expected: list[list[int]]) -> None:
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = system.stub(channel)

        async def complete(request: GenerateRequest) -> CompleteResponse:
            return await stub.Complete(request)

        answers = await asyncio.gather(*map(complete, requests()))
    assert [list(answer.token_ids) for answer in answers] == expected


async def test_text_is_the_decoding_of_the_tokens(system: System, model_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = system.stub(channel)
        for request in requests()[:10]:
            text, token_ids = "", []
            async for event in stub.Generate(request):
                if event.HasField("delta"):
                    text += event.delta.text
                    token_ids += event.delta.token_ids
            assert text == tokenizer.decode(token_ids, skip_special_tokens=True)
