"""Sampling over the handover: both workers together choose what one loop in one process chooses.

The loop is transformers' model and its repetition penalty; the other penalties, the filters and the draw are written
out here as their definitions read. Only the uniform number of each seed, position and token is the engine's own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.engine.sampler import race_key, uniforms
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, kv_transfer_pb2
from tests.integration.workers.harness import VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Sampling = common_pb2.SamplingParams


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * index + 13 * salt + index * index) % VOCAB_SIZE for index in range(length)]


class Loop:
    """One sequence at a time, everything computed anew for each token."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()

    def logits(self, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, -1]
        return logits.to(torch.float64).clone()

    def tokens(self, prompt_ids: list[int], count: int, sampling: Sampling, banned: tuple[list[int], int]) -> list[int]:
        output: list[int] = []
        for index in range(count):
            scores = self._penalized(self.logits(prompt_ids + output), prompt_ids, output, sampling)
            if index < banned[1]:
                scores[banned[0]] = float("-inf")
            output.append(self._choose(scores, sampling, len(prompt_ids) + index))
        return output

    def _penalized(self, logits: Any, prompt_ids: list[int], output: list[int], sampling: Sampling) -> Any:
        import torch
        from transformers import RepetitionPenaltyLogitsProcessor

        if sampling.HasField("repetition_penalty"):
            processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            logits = processor(torch.tensor([prompt_ids + output]), logits[None])[0]
        for token_id, count in Counter(output).items():
            logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
        for token_id, bias in sampling.logit_bias.items():
            logits[token_id] += bias
        return logits

    def _choose(self, scores: Any, sampling: Sampling, position: int) -> int:
        import torch

        if sampling.temperature == 0:
            return int(scores.argmax())
        probabilities = torch.softmax(scores / sampling.temperature, 0)
        if sampling.top_k:
            probabilities[probabilities < probabilities.topk(sampling.top_k).values[-1]] = 0
        times = -uniforms([race_key(sampling.seed, position)], torch.arange(len(scores)))[0].log()
        return int((probabilities / times).argmax())


@pytest.fixture(scope="module")
def loop(tiny_model: Path) -> Iterator[Loop]:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Loop(tiny_model)
    torch.set_num_threads(num_threads)


REQUESTS = {
    "repetition": Sampling(temperature=0, repetition_penalty=1.3),
    "encouraged": Sampling(temperature=0.7, seed=3, repetition_penalty=0.8),
    "frequency": Sampling(temperature=0, frequency_penalty=1.5),
    "presence": Sampling(temperature=0.9, seed=11, presence_penalty=2),
    "bias": Sampling(temperature=0, logit_bias={5: 8, 17: -100}),
    "all": Sampling(
        temperature=0.8,
        seed=2**63 + 5,
        top_k=30,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={7: 2, 9: 2},
    ),
}


async def test_penalties_and_seeds_hold_over_the_handover(pair, loop):
    prompts = {name: prompt(20 + 30 * salt, salt) for salt, name in enumerate(REQUESTS)}
    async with pair.client() as client:
        answers = await asyncio.gather(
            *(
                client.generate(name, prompts[name], sampling=sampling, max_tokens=24)
                for name, sampling in REQUESTS.items()
            )
        )
        for (name, sampling), answer in zip(REQUESTS.items(), answers, strict=True):
            assert answer.tokens == loop.tokens(prompts[name], 24, sampling, ([], 0)), name
        await client.assert_all_free()


async def test_no_stop_token_comes_before_min_tokens(pair, loop):
    greedy = Sampling(temperature=0)
    free = loop.tokens(prompt(20), 12, greedy, ([], 0))
    stops = sorted(set(free))  # ends with its first token if it may
    expected = loop.tokens(prompt(20), 30, greedy, (stops, 9))
    end = next(index for index, token_id in enumerate(expected) if token_id in stops)
    async with pair.client() as client:
        answer = await client.generate("min", prompt(20), min_tokens=9, max_tokens=30, stop_token_ids=stops)
        assert answer.tokens == expected[: end + 1]
        assert end >= 9
        eager = await client.generate("eager", prompt(20), max_tokens=30, stop_token_ids=stops)
        assert eager.tokens == free[:1]
        await client.assert_all_free()


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"sampling": Sampling(repetition_penalty=2)}, InvalidArgumentError, "prompt_token_ids"),
        ({"prompt_token_ids": [1] * 50}, InvalidArgumentError, "prompt_token_ids"),
        (
            {"sampling": Sampling(repetition_penalty=2), "prompt_token_ids": [VOCAB_SIZE] * 50},
            OutOfRangeError,
            "prompt_token_ids",
        ),
        ({"min_tokens": 9}, InvalidArgumentError, "min_tokens"),
        ({"sampling": Sampling(logit_bias={VOCAB_SIZE: 1})}, OutOfRangeError, f"sampling.logit_bias[{VOCAB_SIZE}]"),
        ({"sampling": Sampling(presence_penalty=3)}, InvalidArgumentError, "sampling.presence_penalty"),
    ],
)
async def test_a_bad_decode_names_the_field_and_releases_the_source(pair, changes, error, field):
    async with pair.client() as client:
        prefill = client.prefill.Prefill(client.prefill_request("bad", prompt(50)))
        first = await client.first_token(prefill)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.decode.Decode(client.decode_request("bad", first, **changes)):
                pass
        failure = from_call(caught.value)
        assert (type(failure), failure.field) == (error, field)
        assert (await prefill.read()).released.outcome == kv_transfer_pb2.LEASE_OUTCOME_ABANDONED
        await client.assert_all_free()
