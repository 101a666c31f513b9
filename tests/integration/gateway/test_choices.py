"""Several outputs of one prompt through the gateway, with workers by script: each has a text and an end of its own."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.core.errors import UnavailableError
from baton.core.generation import SamplingParams
from baton.core.workers import WorkerRole
from baton.v1 import common_pb2, decode_pb2, gateway_pb2, prefill_pb2
from tests.integration.gateway.harness import Options, events_of, finished, handover

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.harness import Deployment

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
SEED = 5


@pytest.fixture
def options() -> Options:
    return Options(max_retries=2)


@pytest.fixture
async def deployment(deployment: Deployment) -> Deployment:
    """Two workers of each role, behind one address each."""
    deployment.records += [
        dataclasses.replace(each, worker_id=f"{each.worker_id}b", incarnation=f"{each.incarnation}b")
        for each in deployment.records
    ]
    await deployment.announce()
    return deployment


def request(**changes: Any) -> gateway_pb2.GenerateRequest:
    fields = {
        "text": "The sky",
        "n": 3,
        "sampling": common_pb2.SamplingParams(seed=SEED),
        "stop": common_pb2.StopConditions(max_tokens=6, strings=["two"]),
    } | changes
    return gateway_pb2.GenerateRequest(**fields)


class Texts:
    """Workers whose choices say these texts, the last token of each with a reason; `dies` after so many steps."""

    def __init__(self, deployment: Deployment, *texts: str, dies: int | None = None) -> None:
        self.deployment, self.dies = deployment, dies
        self.ids = [list(deployment.tokenizer.encode(text)) for text in texts]
        deployment.script.prefill, deployment.script.decode = self.prefill, self.decode

    def of(self, request: Any, choice: int) -> list[int]:
        """All ids of what an attempt calls its choice of this number: one alone is known by its seed."""
        seeds = [SamplingParams(seed=SEED).of_choice(index).seed for index in range(len(self.ids))]
        return self.ids[choice if max(request.num_choices, 1) > 1 else seeds.index(request.sampling.seed)]

    async def prefill(self, request: Any, context: Any) -> AsyncIterator[Any]:
        first = prefill_pb2.FirstToken(cached_tokens=3, kv=self.deployment.prefill.descriptor(request))
        for choice in range(max(request.num_choices, 1)):
            message = first.other_choices.add() if choice else first
            message.token_id = self.of(request, choice)[request.num_output_tokens]
            if len(self.of(request, choice)) == 1:
                message.finish_reason = LENGTH
        yield prefill_pb2.PrefillResponse(first_token=first)
        await self.deployment.prefill.released[first.kv.lease_id].wait()
        yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())

    async def decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield handover()
        self.deployment.decode.release(request)
        done, ended = len(request.output_token_ids) + 1, self.deployment.decode.ended_choices
        for step in range(20):
            if self.dies is not None and step == self.dies:
                self.dies = None
                raise UnavailableError("the engine died", reason="ENGINE_DIED")
            for choice in range(max(request.num_choices, 1)):
                ids = self.of(request, choice)
                at = done + step
                if at < len(ids) and (request.attempt_id, choice) not in ended:
                    yield decode_pb2.DecodeResponse(
                        tokens=decode_pb2.DecodedTokens(
                            first_position=request.kv.num_tokens + 1 + step,
                            ids=ids[at : at + 1],
                            choice=choice,
                            finish_reason=LENGTH if at == len(ids) - 1 else 0,
                        )
                    )
        yield finished()


def deltas_of(events: list[gateway_pb2.GenerateResponse], choice: int) -> list[gateway_pb2.Delta]:
    return [event.delta for event in events if event.HasField("delta") and event.delta.choice == choice]


async def test_each_choice_has_its_text_its_tokens_and_its_end(deployment: Deployment) -> None:
    script = Texts(deployment, "one", "a two b c", "red green blue")
    events = await events_of(deployment.stub.Generate(request()))
    for choice, (text, reason) in enumerate([("one", LENGTH), ("a ", STOP), ("red green blue", LENGTH)]):
        deltas = deltas_of(events, choice)
        assert "".join(delta.text for delta in deltas) == text
        ids = [token_id for delta in deltas for token_id in delta.token_ids]
        assert ids == script.ids[choice][: len(ids)]
        assert [delta.finish_reason for delta in deltas] == [0] * (len(deltas) - 1) + [reason]
    end = events[-1].finished
    assert end.reason == LENGTH
    assert end.usage.completion_tokens == sum(len(each.delta.token_ids) for each in events)
    assert (end.usage.prompt_tokens, end.usage.cached_prompt_tokens) == (events[0].accepted.prompt_tokens, 3)
    # One prefill and one handover; the worker was told of the choice that a stop string ended.
    [prefill], [decode] = deployment.prefill.requests, deployment.decode.requests
    assert prefill.num_choices == decode.num_choices == 3
    assert [decode.first_token_id, *decode.other_first_token_ids] == [ids[0] for ids in script.ids]
    assert (decode.attempt_id, 1) in deployment.decode.ended_choices
    assert (decode.attempt_id, 2) not in deployment.decode.ended_choices
    assert deployment.metric("baton_generation_tokens_total") == end.usage.completion_tokens


async def test_a_whole_answer_has_the_first_where_one_alone_has_it_and_the_others_beside(
    deployment: Deployment,
) -> None:
    script = Texts(deployment, "one", "a two b c", "red green blue")
    whole = await deployment.stub.Complete(request(echo=True))
    assert whole.text == "The skyone"
    assert list(whole.token_ids) == script.ids[0]
    assert [(other.text, other.reason) for other in whole.other_choices] == [
        ("The skya ", STOP),
        ("The skyred green blue", LENGTH),
    ]
    assert list(whole.other_choices[1].token_ids) == script.ids[2]


async def test_stop_strings_that_end_all_choices_end_the_worker_call(deployment: Deployment) -> None:
    Texts(deployment, "two a b", "c two a b c", "two")
    whole = await deployment.stub.Complete(request())
    assert [whole.text, *(other.text for other in whole.other_choices)] == ["", "c ", ""]
    assert whole.finished.reason == STOP


@pytest.mark.parametrize("dies", [0, 1, 2])
async def test_what_a_dead_worker_cut_off_is_made_up_choice_by_choice(deployment: Deployment, dies: int) -> None:
    texts = ["one", "red green blue", "a b c d"]
    script = Texts(deployment, *texts, dies=dies)
    events = await events_of(deployment.stub.Generate(request()))
    for choice, text in enumerate(texts):
        deltas = deltas_of(events, choice)
        assert "".join(delta.text for delta in deltas) == text
        assert [token_id for delta in deltas for token_id in delta.token_ids] == script.ids[choice]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [LENGTH]
    assert events[-1].finished.usage.completion_tokens == sum(map(len, script.ids))
    cut_off = [ids for ids in script.ids if len(ids) > 1 + dies]
    assert [each.num_output_tokens for each in deployment.prefill.requests] == [0] + [1 + dies] * len(cut_off)
    assert all(each.num_choices == 1 for each in deployment.prefill.requests[1:])
    assert deployment.metric("baton_retries_total", role="decode") == 1


@pytest.mark.parametrize(
    ("changes", "field", "limit"),
    [({"n": 4}, "n", "3"), ({"n": 3, "stop": common_pb2.StopConditions(max_tokens=2150)}, "stop.max_tokens", "2126")],
)
async def test_what_no_worker_could_hold_is_refused_with_the_limit(
    deployment: Deployment, changes: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(request(**changes))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert field in caught.value.details()
    assert limit in caught.value.details()


async def test_each_choice_takes_a_seat_and_its_blocks(deployment: Deployment) -> None:
    texts, gate = Texts(deployment, "one", "a b", "red green blue"), asyncio.Event()

    async def held(request: Any, context: Any) -> AsyncIterator[Any]:
        await gate.wait()
        async for response in texts.decode(request, context):
            yield response

    deployment.script.decode = held
    call = deployment.stub.Generate(request(stop=common_pb2.StopConditions(max_tokens=40)))
    assert (await call.read()).HasField("accepted")
    assert (await call.read()).HasField("delta")
    views = [view for view in await deployment.queue.workers() if view.record.role is WorkerRole.DECODE]
    # The prompt fills no block, so each has three of its own.
    assert sorted((view.granted_seqs, view.granted_blocks) for view in views) == [(0, 0), (3, 9)]
    gate.set()
    await events_of(call)
