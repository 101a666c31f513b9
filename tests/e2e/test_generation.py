"""Penalties, log-probabilities and structure through the whole system, against transformers on the real model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc
import jsonschema
import pytest
import torch

from baton.core.generation import SamplingParams
from baton.v1 import common_pb2, gateway_pb2

if TYPE_CHECKING:
    from tests.e2e.conftest import Reference, System

TEXT = "The three largest rivers of Europe are the"
MAX_TOKENS = 24
TOLERANCE = 2e-3
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.timeout(600)


async def complete(system: System, request: gateway_pb2.GenerateRequest) -> gateway_pb2.CompleteResponse:
    async with grpc.aio.insecure_channel(system.address) as channel:
        return await system.stub(channel).Complete(request)


async def test_a_repetition_penalty_gives_the_tokens_of_transformers(system: System, reference: Reference) -> None:
    ids = torch.tensor([reference.tokenizer(TEXT)["input_ids"]])
    with torch.inference_mode():
        output = reference.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            repetition_penalty=1.25,
        )
    request = gateway_pb2.GenerateRequest(
        text=TEXT,
        sampling=common_pb2.SamplingParams(temperature=0, repetition_penalty=1.25),
        stop=common_pb2.StopConditions(max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS),
    )
    answer = await complete(system, request)
    assert list(answer.token_ids) == output[0, ids.shape[1] :].tolist()


async def test_log_probabilities_are_those_of_transformers(system: System, reference: Reference) -> None:
    tokenizer = reference.tokenizer
    request = gateway_pb2.GenerateRequest(
        text=TEXT,
        echo=True,
        sampling=common_pb2.SamplingParams(temperature=1.3, seed=4, presence_penalty=1),
        stop=common_pb2.StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
        logprobs=common_pb2.LogprobOptions(output_top=5, prompt_top=1),
    )
    answer = await complete(system, request)
    prompt = tokenizer(TEXT)["input_ids"]
    ids = prompt + list(answer.token_ids)
    expected = reference.log_probabilities(ids)
    assert list(answer.scored_prompt.token_ids) == prompt[1:]
    entries = [*answer.scored_prompt.logprobs, *answer.logprobs]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries, start=1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(row[ids[position]].item(), abs=TOLERANCE)
        largest = row.topk(len(entry.top_ids)).values.tolist()
        assert list(entry.top_logprobs) == pytest.approx(largest, abs=TOLERANCE)
    assert {len(entry.top_ids) for entry in answer.logprobs} == {5}
    assert answer.text == TEXT + tokenizer.decode(answer.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(3))
async def test_a_chat_answers_in_json(system: System, seed: int) -> None:
    request = gateway_pb2.GenerateRequest(
        messages=[gateway_pb2.ChatMessage(role="user", content="Tell me about a city of your choice, as JSON.")],
        sampling=common_pb2.SamplingParams(seed=seed),
        stop=common_pb2.StopConditions(max_tokens=80),
        structure=common_pb2.Structure(json_schema=json.dumps(SCHEMA)),
    )
    answer = await complete(system, request)
    assert answer.finished.reason == common_pb2.FINISH_REASON_STOP
    jsonschema.validate(json.loads(answer.text), SCHEMA)


async def test_the_outputs_of_one_prompt_are_those_that_their_seeds_give_alone(system: System) -> None:
    def request(n: int, seed: int) -> gateway_pb2.GenerateRequest:
        return gateway_pb2.GenerateRequest(
            text=TEXT,
            n=n,
            sampling=common_pb2.SamplingParams(temperature=0.9, seed=seed, frequency_penalty=0.3),
            stop=common_pb2.StopConditions(max_tokens=MAX_TOKENS, strings=["."]),
        )

    answer = await complete(system, request(3, 77))
    outputs = [answer, *answer.other_choices]
    assert len({output.text for output in outputs}) == 3
    for choice, output in enumerate(outputs):
        alone = await complete(system, request(1, SamplingParams(seed=77).of_choice(choice).seed))
        assert (list(output.token_ids), output.text) == (list(alone.token_ids), alone.text)
        reason = answer.finished.reason if choice == 0 else output.reason
        assert reason == alone.finished.reason
    assert answer.finished.usage.prompt_tokens == alone.finished.usage.prompt_tokens
    assert answer.finished.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
