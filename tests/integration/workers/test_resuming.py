"""An attempt that follows a lost one: from any point of an output it goes on with the tokens of the undisturbed one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.core.errors import InvalidArgumentError, OutOfRangeError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, prefill_pb2
from tests.integration.workers.harness import MAX_CONTEXT, VOCAB_SIZE

if TYPE_CHECKING:
    from tests.integration.workers.harness import Client

Sampling = common_pb2.SamplingParams

PROMPT = [(11 * index + index * index) % VOCAB_SIZE for index in range(45)]
NUM_TOKENS = 14
# Cuts before, at and after the ends of blocks of 16 positions, and one before the last token.
CUTS = (1, 2, 3, 4, 9, NUM_TOKENS - 1)
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": Sampling(temperature=0)},
    "seeded": {"sampling": Sampling(temperature=0.9, seed=2**63 + 7, top_k=40)},
    "penalties": {
        "sampling": Sampling(
            temperature=0.8,
            seed=5,
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.4,
            logit_bias={3: 1.5},
        )
    },
    "fewest": {"sampling": Sampling(temperature=1, seed=9), "min_tokens": 12, "stop_token_ids": list(range(0, 211, 2))},
}


async def resume(client: Client, attempt_id: str, output: list[int], changes: dict[str, Any]) -> list[Any]:
    """The rest after `output`: (token, log-probabilities) each."""
    token_ids = PROMPT + output
    logprobs = common_pb2.LogprobOptions(output_top=2)
    request = client.prefill_request(
        attempt_id, token_ids, num_output_tokens=len(output), logprobs=logprobs, max_tokens=NUM_TOKENS, **changes
    )
    prefill = client.prefill.Prefill(request)
    first = await client.first_token(prefill)
    rest = [(first.token_id, first.logprobs)]
    if first.HasField("kv"):
        has_penalty = changes["sampling"].HasField("repetition_penalty")
        decode = client.decode.Decode(
            client.decode_request(
                attempt_id,
                first,
                output_token_ids=output,
                prompt_token_ids=PROMPT if has_penalty else [],
                top_logprobs=2,
                max_tokens=NUM_TOKENS,
                **changes,
            )
        )
        position = len(token_ids) + 1
        async for event in decode:
            if event.HasField("tokens"):
                assert event.tokens.first_position == position
                position += len(event.tokens.ids)
                rest += zip(event.tokens.ids, event.tokens.logprobs, strict=True)
                reason = event.tokens.finish_reason
        assert reason == event.finished.reason  # the last tokens bring it too
    assert (await prefill.read()).HasField("released")
    return rest


@pytest.mark.parametrize("name", REQUESTS)
async def test_every_cut_goes_on_as_the_whole_did(pair, name: str) -> None:
    changes = REQUESTS[name]
    async with pair.client() as client:
        whole = await resume(client, f"{name}-whole", [], changes)
        ids = [token_id for token_id, _ in whole]
        assert len(ids) >= 12
        for cut in [cut for cut in CUTS if cut < len(ids)]:
            rest = await resume(client, f"{name}-{cut}", ids[:cut], changes)
            assert [token_id for token_id, _ in rest] == ids[cut:], cut
            for (_, found), (_, expected) in zip(rest, whole[cut:], strict=True):
                assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
                assert list(found.top_ids) == list(expected.top_ids)
        await client.assert_all_free()


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"num_output_tokens": 45}, InvalidArgumentError, "num_output_tokens"),
        ({"num_output_tokens": 8, "max_tokens": 8}, InvalidArgumentError, "max_tokens"),
        ({"num_output_tokens": 5, "max_tokens": MAX_CONTEXT - 39}, OutOfRangeError, "max_tokens"),
    ],
)
async def test_a_bad_prefill_names_the_field(pair, changes: dict[str, Any], error: Any, field: str) -> None:
    async with pair.client() as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.prefill.Prefill(client.prefill_request("bad", PROMPT, **changes)).read()
        failure = from_call(caught.value)
        assert (type(failure), failure.field) == (error, field)


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"output_token_ids": [1] * 45}, InvalidArgumentError, "output_token_ids"),
        ({"output_token_ids": [VOCAB_SIZE]}, OutOfRangeError, "output_token_ids"),
        ({"output_token_ids": [1] * 7}, InvalidArgumentError, "max_tokens"),
    ],
)
async def test_a_bad_decode_names_the_field_and_releases_the_source(
    pair, changes: dict[str, Any], error: Any, field: str
) -> None:
    async with pair.client() as client:
        prefill = client.prefill.Prefill(client.prefill_request("bad", PROMPT))
        first: prefill_pb2.FirstToken = await client.first_token(prefill)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.decode.Decode(client.decode_request("bad", first, **changes)).read()
        failure = from_call(caught.value)
        assert (type(failure), failure.field) == (error, field)
        assert (await prefill.read()).HasField("released")
        await client.assert_all_free()
