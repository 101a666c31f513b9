"""Log-probabilities from both workers, against the log-softmax of transformers' logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.core.errors import InvalidArgumentError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2
from tests.integration.workers.harness import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOLERANCE = 1e-3


def prompt(length: int) -> list[int]:
    return [(7 * index + index * index) % VOCAB_SIZE for index in range(length)]


@pytest.fixture(scope="module")
def log_softmax(tiny_model: Path) -> Iterator[Callable[[list[int]], Any]]:
    """Log-probabilities [positions, vocabulary]: row i is for the token after position i."""
    import torch
    from transformers import AutoModelForCausalLM

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()

    def of(ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].to(torch.float64), dim=-1)

    yield of
    torch.set_num_threads(num_threads)


def assert_equal(entry: common_pb2.TokenLogprobs, expected: Any, token_id: int, top: int) -> None:
    assert entry.logprob == pytest.approx(expected[token_id].item(), abs=TOLERANCE)
    assert len(entry.top_ids) == len(entry.top_logprobs) == top
    assert list(entry.top_logprobs) == pytest.approx(expected.topk(top).values.tolist(), abs=TOLERANCE)
    own = [expected[token].item() for token in entry.top_ids]
    assert list(entry.top_logprobs) == pytest.approx(own, abs=TOLERANCE)


async def test_of_prompt_and_output_they_are_the_models_own(pair, log_softmax):
    """A prompt of several chunks; what changes the choice does not change them."""
    ids = prompt(1200)
    sampling = common_pb2.SamplingParams(temperature=1.7, seed=5, top_k=9, frequency_penalty=2, logit_bias={3: 50})
    options = common_pb2.LogprobOptions(output_top=4, prompt_top=2)
    async with pair.client() as client:
        call = client.prefill.Prefill(
            client.prefill_request("scored", ids, sampling=sampling, max_tokens=12, logprobs=options)
        )
        assert (await call.read()).HasField("started")
        scores: list[common_pb2.TokenLogprobs] = []
        num_parts = 0
        while not (event := await call.read()).HasField("first_token"):
            if event.HasField("growing_cache"):
                continue
            assert event.prompt_logprobs.first_position == 1 + len(scores)
            scores += event.prompt_logprobs.logprobs
            num_parts += 1
        first = event.first_token
        assert num_parts == first.num_chunks > 1
        output, entries = [first.token_id], [first.logprobs]
        request = client.decode_request("scored", first, sampling=sampling, max_tokens=12, top_logprobs=4)
        async for event in client.decode.Decode(request):
            output += event.tokens.ids
            entries += event.tokens.logprobs
        expected = log_softmax(ids + output)
        assert len(scores) == len(ids) - 1
        for position, entry in enumerate(scores, start=1):
            assert_equal(entry, expected[position - 1], ids[position], 2)
        assert len(entries) == len(output) == 12
        for index, entry in enumerate(entries):
            assert_equal(entry, expected[len(ids) + index - 1], output[index], 4)
        await client.assert_all_free()


async def test_they_come_only_for_those_who_ask(pair):
    async with pair.client() as client:
        quiet = await client.generate("quiet", prompt(40))
        assert not quiet.prefill_events[1].first_token.HasField("logprobs")
        assert not any(event.tokens.logprobs for event in quiet.decode_events)
        one = client.prefill.Prefill(
            client.prefill_request("one", [5], max_tokens=1, logprobs=common_pb2.LogprobOptions(prompt_top=0))
        )
        kinds = [event.WhichOneof("event") async for event in one]
        assert kinds == ["started", "first_token", "released"]  # the only token follows nothing
        await client.assert_all_free()


async def test_more_than_the_limit_is_refused(pair):
    async with pair.client() as client:
        for options, field in (
            (common_pb2.LogprobOptions(output_top=21), "logprobs.output_top"),
            (common_pb2.LogprobOptions(prompt_top=21), "logprobs.prompt_top"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.prefill.Prefill(client.prefill_request("bad", [5], logprobs=options)).read()
            failure = from_call(caught.value)
            assert isinstance(failure, InvalidArgumentError)
            assert failure.field == field
            assert "[0, 20]; it is 21" in failure.description
