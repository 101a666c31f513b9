"""Log-probabilities on their way through the gateway, over real gRPC and a real Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.rpc.errors import from_call
from baton.v1 import common_pb2, decode_pb2, gateway_pb2, prefill_pb2
from tests.integration.gateway.harness import events_of, finished, handover, lease_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.harness import Deployment

OPTIONS = common_pb2.LogprobOptions(output_top=1, prompt_top=0)
REQUEST = gateway_pb2.GenerateRequest(
    token_ids=common_pb2.TokenIds(ids=[5, 6, 7]), stop=common_pb2.StopConditions(max_tokens=3), logprobs=OPTIONS
)


def entry(value: float, *top: tuple[int, float]) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=value, top_ids=[token_id for token_id, _ in top], top_logprobs=[logprob for _, logprob in top]
    )


OF_PROMPT = [entry(-0.25), entry(-4.0)]
OF_OUTPUT = [entry(-1.0, (9, -0.5)), entry(-2.0, (8, -0.25)), entry(-3.0, (7, -0.125))]


def scored(first_position: int, *entries: common_pb2.TokenLogprobs) -> prefill_pb2.PrefillResponse:
    part = prefill_pb2.PromptLogprobs(first_position=first_position, logprobs=entries)
    return prefill_pb2.PrefillResponse(prompt_logprobs=part)


def follow(deployment: Deployment, *parts: Any, of_output: list[common_pb2.TokenLogprobs]) -> None:
    """Scripts the workers."""

    async def prefill(request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        assert request.logprobs == OPTIONS
        for part in parts:
            yield part
        yield deployment.prefill.first_token(request, kv=deployment.prefill.descriptor(request), logprobs=of_output[0])
        await deployment.prefill.released[lease_of(request)].wait()
        yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())

    async def decode(request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        assert request.top_logprobs == 1
        yield handover()
        deployment.decode.release(request)
        tokens = decode_pb2.DecodedTokens(
            first_position=request.kv.num_tokens + 1, ids=[101, 102], logprobs=of_output[1:]
        )
        yield decode_pb2.DecodeResponse(tokens=tokens)
        yield finished()

    deployment.script.prefill, deployment.script.decode = prefill, decode


async def test_they_stream_beside_their_tokens(deployment: Deployment) -> None:
    follow(deployment, scored(1, OF_PROMPT[0]), scored(2, OF_PROMPT[1]), of_output=OF_OUTPUT)
    events = await events_of(deployment.stub.Generate(REQUEST))
    parts = [event.scored_prompt for event in events if event.HasField("scored_prompt")]
    assert [(part.first_position, list(part.token_ids)) for part in parts] == [(1, [6]), (2, [7])]
    assert [each for part in parts for each in part.logprobs] == OF_PROMPT
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert [each for delta in deltas for each in delta.logprobs] == OF_OUTPUT
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    await deployment.assert_idle()


async def test_a_whole_answer_has_them_all(deployment: Deployment) -> None:
    follow(deployment, scored(1, OF_PROMPT[0]), scored(2, OF_PROMPT[1]), of_output=OF_OUTPUT)
    answer = await deployment.stub.Complete(REQUEST)
    assert list(answer.logprobs) == OF_OUTPUT
    assert answer.scored_prompt == gateway_pb2.ScoredPrompt(first_position=1, token_ids=[6, 7], logprobs=OF_PROMPT)


@pytest.mark.parametrize(
    ("parts", "of_output"),
    [
        ([scored(1, OF_PROMPT[0])], OF_OUTPUT),  # one missing
        ([scored(1, *OF_PROMPT, OF_PROMPT[0])], OF_OUTPUT),  # one too many
        ([scored(1, OF_PROMPT[0]), scored(1, OF_PROMPT[1])], OF_OUTPUT),  # the same place twice
        ([scored(1, *OF_PROMPT)], OF_OUTPUT[:2]),  # a token without
    ],
)
async def test_a_worker_that_tells_other_places_breaks_the_contract(
    deployment: Deployment, parts: list[Any], of_output: list[common_pb2.TokenLogprobs]
) -> None:
    follow(deployment, *parts, of_output=of_output)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(REQUEST)
    assert from_call(caught.value).reason == "WORKER_PROTOCOL"
    await deployment.assert_idle()
