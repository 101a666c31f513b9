"""A request's way when all goes well, over real gRPC and a real Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.core.workers import WorkerState
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2, prefill_pb2
from tests.integration.gateway.harness import (
    Options,
    events_of,
    eventually,
    finished,
    handover,
    ids_of,
    text_of,
    tokens,
)

if TYPE_CHECKING:
    from tests.integration.gateway.harness import Deployment


async def test_the_stream_is_accepted_deltas_finished(deployment: Deployment) -> None:
    deployment.script.answer = deployment.tokenizer.encode("Größe ist 漢字, naïve 🙂 you see")
    deployment.script.answer.append(2)
    deployment.script.reason = common_pb2.FINISH_REASON_STOP
    request = gateway_pb2.GenerateRequest(
        request_id="my-request", messages=[gateway_pb2.ChatMessage(role="user", content="hello")]
    )
    events = await events_of(deployment.stub.Generate(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "finished"]
    accepted, done = events[0].accepted, events[-1].finished
    assert (accepted.request_id, accepted.model, accepted.queue_class) == ("my-request", "smol", "chat")
    [prefill] = deployment.prefill.requests
    assert accepted.prompt_tokens == len(prefill.token_ids)
    assert text_of(events) == "Größe ist 漢字, naïve 🙂 you see"
    assert ids_of(events) == deployment.script.answer
    assert not any("\ufffd" in event.delta.text for event in events)
    assert done.reason == common_pb2.FINISH_REASON_STOP
    assert done.usage.prompt_tokens == len(prefill.token_ids)
    assert done.usage.completion_tokens == len(deployment.script.answer)
    assert done.usage.cached_prompt_tokens == 2
    times = done.timings
    parts = times.tokenize_s + times.queue_s + times.prefill_s + times.handover_s + times.decode_s
    assert 0 < parts <= times.total_s
    assert min(times.tokenize_s, times.queue_s, times.prefill_s, times.handover_s, times.decode_s) >= 0
    assert times.time_to_first_token_s <= times.total_s


async def test_workers_get_every_default_filled_in(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[5, 6, 7]),
        sampling=common_pb2.SamplingParams(temperature=0.5, top_k=3),
        stop=common_pb2.StopConditions(max_tokens=4, token_ids=[9]),
    )
    await deployment.stub.Complete(request)
    [prefill], [decode] = deployment.prefill.requests, deployment.decode.requests
    assert list(prefill.token_ids) == [5, 6, 7]
    assert prefill.sampling == decode.sampling
    sampling = prefill.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 1.0, 0.0)
    assert all(sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
    assert prefill.max_tokens == decode.max_tokens == 4
    assert list(prefill.stop_token_ids) == list(decode.stop_token_ids) == [2, 9]
    assert prefill.attempt_id == decode.attempt_id
    assert decode.first_token_id == deployment.script.answer[0]
    # What the gateway does not need to understand goes on unchanged.
    assert decode.kv == deployment.prefill.descriptor(prefill)
    assert prefill.fingerprint.tokenizer == deployment.model.fingerprint.tokenizer


async def test_seeds_are_drawn_anew_unless_given(deployment: Deployment) -> None:
    for seed in (None, None, 0):
        request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(max_tokens=1))
        if seed is not None:
            request.sampling.seed = seed
        await deployment.stub.Complete(request)
    first, second, given = (request.sampling.seed for request in deployment.prefill.requests)
    assert first != second
    assert given == 0


async def test_complete_is_the_stream_put_together(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(text="The sky", stop=common_pb2.StopConditions(max_tokens=4))
    events = await events_of(deployment.stub.Generate(request))
    whole = await deployment.stub.Complete(request)
    assert whole.text == text_of(events) == deployment.tokenizer.decode(deployment.script.answer)
    assert list(whole.token_ids) == ids_of(events)
    assert whole.finished.usage == events[-1].finished.usage
    assert whole.accepted.prompt_tokens == events[0].accepted.prompt_tokens
    assert whole.accepted.request_id != events[0].accepted.request_id


async def test_one_token_needs_no_decode(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(text="The sky", stop=common_pb2.StopConditions(max_tokens=1))
    done = await deployment.stub.Complete(request)
    assert done.finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert (done.finished.timings.handover_s, done.finished.timings.decode_s) == (0, 0)
    assert list(done.token_ids) == deployment.script.answer[:1]
    assert deployment.decode.requests == []


async def test_the_first_token_is_sent_before_decode_answers(deployment: Deployment) -> None:
    gate = asyncio.Event()

    async def decode(request: Any, context: Any) -> Any:
        await gate.wait()
        async for response in deployment.decode.usual(request, context):
            yield response

    deployment.script.decode = decode
    call = deployment.stub.Generate(gateway_pb2.GenerateRequest(text="The sky"))
    assert (await call.read()).HasField("accepted")
    first = (await call.read()).delta
    assert list(first.token_ids) == deployment.script.answer[:1]
    gate.set()
    rest = await events_of(call)
    assert rest[-1].HasField("finished")


async def test_a_stop_token_counts_and_does_not_show(deployment: Deployment) -> None:
    deployment.script.answer = [*deployment.tokenizer.encode("one two"), 100]
    deployment.script.reason = common_pb2.FINISH_REASON_STOP
    request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(token_ids=[100]))
    done = await deployment.stub.Complete(request)
    assert done.text == "one two"
    assert list(done.token_ids) == deployment.script.answer
    assert done.finished.usage.completion_tokens == len(deployment.script.answer)


async def test_a_stop_string_over_tokens_ends_the_worker_call(deployment: Deployment) -> None:
    cancelled = asyncio.Event()
    ids = deployment.tokenizer.encode("alpha beta gamma delta epsilon")
    stop_at = next(end for end in range(1, len(ids)) if "ta gam" in deployment.tokenizer.decode(ids[:end]))

    async def decode(request: Any, context: Any) -> Any:
        yield handover()
        deployment.decode.release(request)
        # All in one message: tokens after the stop string do not belong to the output.
        yield tokens(request.kv.num_tokens + 1, *ids[1:])
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    deployment.script.answer, deployment.script.decode = ids, decode
    request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(strings=["ta gam", "never"]))
    done = await deployment.stub.Complete(request)
    assert done.text == "alpha be"
    assert done.finished.reason == common_pb2.FINISH_REASON_STOP
    assert list(done.token_ids) == ids[:stop_at]
    assert done.finished.usage.completion_tokens == stop_at
    async with asyncio.timeout(20):
        await cancelled.wait()


async def test_a_stop_string_in_the_first_token_starts_no_decode(deployment: Deployment) -> None:
    deployment.script.answer = deployment.tokenizer.encode(" hello there")
    request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(strings=["ell"]))
    done = await deployment.stub.Complete(request)
    assert (done.text, done.finished.reason) == (" h", common_pb2.FINISH_REASON_STOP)
    assert deployment.decode.requests == []


async def test_a_beginning_of_a_stop_string_comes_out_at_the_end(deployment: Deployment) -> None:
    deployment.script.answer = deployment.tokenizer.encode("one two")
    request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(strings=["two three"]))
    events = await events_of(deployment.stub.Generate(request))
    assert text_of(events) == "one two"
    assert [list(event.delta.token_ids) for event in events[1:-1]][-1] == []


async def test_unknown_events_and_reasons_of_newer_workers_are_tolerated(deployment: Deployment) -> None:
    async def prefill(request: Any, context: Any) -> Any:
        yield prefill_pb2.PrefillResponse()
        async for response in deployment.prefill.usual(request, context):
            yield response

    async def decode(request: Any, context: Any) -> Any:
        deployment.decode.release(request)
        yield type(handover())()
        yield handover()
        yield finished(77)

    deployment.script.prefill, deployment.script.decode = prefill, decode
    done = await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x"))
    assert done.finished.reason == common_pb2.FINISH_REASON_UNSPECIFIED


async def test_prefill_credit_is_back_while_decode_runs(deployment: Deployment) -> None:
    gate = asyncio.Event()

    async def decode(request: Any, context: Any) -> Any:
        yield handover()
        deployment.decode.release(request)
        await gate.wait()
        yield finished()

    deployment.script.decode = decode
    call = deployment.stub.Generate(gateway_pb2.GenerateRequest(text="The sky"))
    await call.read()

    async def credit() -> dict[str, int]:
        return {view.record.worker_id: view.granted_seqs for view in await deployment.queue.workers()}

    async def only_decode() -> bool:
        return await credit() == {"p1": 0, "d1": 1}

    await eventually(only_decode)
    assert deployment.metric("baton_num_requests_running") == 1
    gate.set()
    await events_of(call)


async def test_many_requests_share_the_workers(deployment: Deployment) -> None:
    """Eight requests, four slots on each side; none is lost or mixed up."""
    requests = [
        gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[10 + index] * (index + 1))) for index in range(8)
    ]
    done = await asyncio.gather(*(deployment.stub.Complete(request) for request in requests))
    assert [answer.accepted.prompt_tokens for answer in done] == list(range(1, 9))
    assert {answer.text for answer in done} == {deployment.tokenizer.decode(deployment.script.answer)}
    assert deployment.metric("baton_requests_total", outcome="length") == 8
    assert deployment.metric("baton_generation_tokens_total") == 32
    assert deployment.metric("baton_time_to_first_token_seconds_count", queue_class="chat") == 8
    assert deployment.metric("baton_inter_token_latency_seconds_count", queue_class="chat") == 24


async def test_long_prompts_wait_in_their_own_class(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5] * 1024))
    assert (await deployment.stub.Complete(request)).accepted.queue_class == "long"


async def test_a_live_request_id_is_refused(deployment: Deployment) -> None:
    gate = asyncio.Event()

    async def decode(request: Any, context: Any) -> Any:
        await gate.wait()
        async for response in deployment.decode.usual(request, context):
            yield response

    deployment.script.decode = decode
    request = gateway_pb2.GenerateRequest(text="x", request_id="same")
    first = deployment.stub.Generate(request)
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(request)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    gate.set()
    await events_of(first)
    await deployment.stub.Complete(request)


async def test_a_full_queue_says_when_to_come_back(deployment: Deployment) -> None:
    gate = asyncio.Event()

    async def prefill(request: Any, context: Any) -> Any:
        await gate.wait()
        async for response in deployment.prefill.usual(request, context):
            yield response

    deployment.script.prefill = prefill
    calls = [deployment.stub.Generate(gateway_pb2.GenerateRequest(text="x")) for _ in range(4)]
    await eventually(lambda: deployment.prefill.num_active == 4)
    # All slots are taken; there are eight places.
    calls += [deployment.stub.Generate(gateway_pb2.GenerateRequest(text="x")) for _ in range(8)]
    positions = [(await call.read()).accepted.queue_position for call in calls[4:]]
    assert sorted(positions) == list(range(8))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x"))
    error = from_call(caught.value)
    assert (caught.value.code(), error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert error.retry_after_s > 0
    status = await deployment.stub.GetStatus(gateway_pb2.GetStatusRequest())
    assert [queue.num_waiting for queue in status.queues if queue.queue_class == "chat"] == [8]
    assert status.num_active == 12
    gate.set()
    await asyncio.gather(*(events_of(call) for call in calls))


async def test_status_and_models(deployment: Deployment) -> None:
    status = await deployment.stub.GetStatus(gateway_pb2.GetStatusRequest())
    assert status.model == "smol"
    assert {(queue.queue_class, queue.max_waiting) for queue in status.queues} == {("chat", 8), ("long", 2)}
    workers = {worker.worker_id: worker for worker in status.workers}
    assert workers["p1"].role == common_pb2.WORKER_ROLE_PREFILL
    assert workers["d1"].state == common_pb2.WORKER_STATE_READY
    assert (workers["d1"].num_blocks, workers["d1"].block_size_tokens) == (400, 16)
    [model] = (await deployment.stub.ListModels(gateway_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context_tokens, model.vocab_size) == ("smol", 8192, 49152)
    assert list(model.eos_token_ids) == [2]
    assert model.has_chat_template
    assert model.fingerprint.dtype == "float32"
    assert (await deployment.stub.GetModel(gateway_pb2.GetModelRequest(name="smol"))).model == model


async def test_tokenize_is_what_generate_does_and_detokenize_its_inverse(deployment: Deployment) -> None:
    messages = [gateway_pb2.ChatMessage(role="user", content="hello 漢")]
    ids = (await deployment.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=messages))).token_ids
    await deployment.stub.Complete(
        gateway_pb2.GenerateRequest(messages=messages, stop=common_pb2.StopConditions(max_tokens=1))
    )
    assert list(deployment.prefill.requests[0].token_ids) == list(ids)
    shown = await deployment.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=ids, include_special_tokens=True))
    assert shown.text.endswith("<|im_start|>user\nhello 漢<|im_end|>\n<|im_start|>assistant\n")
    plain = await deployment.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=ids))
    assert plain.text.endswith("user\nhello 漢\nassistant\n")
    text = await deployment.stub.Tokenize(gateway_pb2.TokenizeRequest(text="hello"))
    assert list(text.token_ids) == deployment.tokenizer.encode("hello")


async def test_a_misfit_worker_gets_nothing_and_stays_visible(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    [prefill, decode] = deployment.records
    other = dataclasses.replace(prefill.fingerprint, tokenizer="another")
    deployment.records.append(
        dataclasses.replace(prefill, worker_id="a-misfit", fingerprint=other, address="127.0.0.1:1")
    )
    deployment.records.append(
        dataclasses.replace(decode, worker_id="a-leaver", state=WorkerState.DRAINING, address="127.0.0.1:1")
    )
    with caplog.at_level("WARNING", logger="gateway"):
        await deployment.announce()
        for _ in range(3):
            await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x"))
    status = await deployment.stub.GetStatus(gateway_pb2.GetStatusRequest())
    assert {worker.worker_id for worker in status.workers} == {"p1", "d1", "a-misfit", "a-leaver"}

    def warned_of() -> list[str]:
        return [record.worker_id for record in caplog.records if "another model" in record.message]

    await eventually(warned_of)
    assert warned_of() == ["a-misfit"]


async def test_tenants_take_turns_and_priority_orders_a_tenants_own(deployment: Deployment) -> None:
    gate, started = asyncio.Semaphore(0), []

    async def held(request: Any, context: Any) -> Any:
        started.append(request.token_ids[0])
        await gate.acquire()
        async for response in deployment.prefill.usual(request, context):
            yield response

    deployment.script.prefill = held

    def send(first_token: int, tenant: str, priority: int = 0) -> Any:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[first_token]),
            stop=common_pb2.StopConditions(max_tokens=1),
            priority=priority,
        )
        return deployment.stub.Generate(request, metadata=(("x-baton-tenant", tenant),))

    running = [send(100, "flood") for _ in range(4)]
    await eventually(lambda: len(started) == 4)
    waiting, positions = [], []
    for each in ((1, "flood"), (2, "flood"), (3, "flood", 5), (4, "calm"), (5, "calm", 1)):
        waiting.append(send(*each))
        positions.append((await waiting[-1].read()).accepted.queue_position)
    # Those that were there first: each sees what was there when it came.
    assert positions == [0, 1, 0, 1, 1]
    for num_started in range(5, 10):  # one slot becomes free, and one request takes it
        gate.release()
        await eventually(lambda wanted=num_started: len(started) == wanted)
    for _ in range(4):
        gate.release()
    for call in running + waiting:
        await events_of(call)
    assert started[4:] == [3, 5, 1, 4, 2]


async def test_tenant_and_priority_reach_the_decode_worker(deployment: Deployment) -> None:
    request = gateway_pb2.GenerateRequest(text="x", priority=-3)
    await deployment.stub.Complete(request, metadata=(("x-baton-tenant", "calm"),))
    [sent] = deployment.decode.requests
    assert (sent.tenant, sent.priority) == ("calm", -3)


@pytest.mark.parametrize("priority", [11, -11])
async def test_a_priority_out_of_range_is_refused(deployment: Deployment, priority: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x", priority=priority))
    assert (caught.value.code(), from_call(caught.value).field) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")


async def test_a_tenant_that_is_no_name_is_refused(deployment: Deployment) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deployment.stub.Complete(gateway_pb2.GenerateRequest(text="x"), metadata=(("x-baton-tenant", "a|b"),))
    error = from_call(caught.value)
    assert (caught.value.code(), error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "x-baton-tenant")


@pytest.mark.parametrize(("options", "salts"), [(Options(), {"a", "b"}), (Options(shares_prefixes=True), {""})])
async def test_tenants_share_cached_beginnings_only_where_it_is_set(deployment: Deployment, salts: set[str]) -> None:
    for tenant in "ab":
        request = gateway_pb2.GenerateRequest(text="x", stop=common_pb2.StopConditions(max_tokens=1))
        await deployment.stub.Complete(request, metadata=(("x-baton-tenant", tenant),))
    assert {request.cache_salt for request in deployment.prefill.requests} == salts


async def test_the_class_is_that_of_what_has_to_be_computed(deployment: Deployment) -> None:
    ids = [5 + index % 300 for index in range(1100)]

    async def queue_class(*extra: int, tenant: str = "a", **fields: Any) -> str:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[*ids, *extra]), stop=common_pb2.StopConditions(max_tokens=1), **fields
        )
        done = await deployment.stub.Complete(request, metadata=(("x-baton-tenant", tenant),))
        assert done.accepted.prompt_tokens == len(ids) + len(extra)
        return done.accepted.queue_class

    # A worker that says that it keeps nothing is expected to have nothing.
    assert [await queue_class(), await queue_class()] == ["long", "long"]
    deployment.records = [dataclasses.replace(record, caches_prefixes=True) for record in deployment.records]
    await deployment.announce()
    await eventually(lambda: all(view.record.caches_prefixes for view in deployment.queue.views))
    assert [await queue_class(), await queue_class(), await queue_class(7, 8, 9)] == ["long", "chat", "chat"]
    assert await queue_class(tenant="b") == "long"
    assert await queue_class(*range(10, 1000)) == "chat"
    assert await queue_class(*range(11, 1100)) == "long"
    # Another life of the worker has to compute it again.
    deployment.records = [dataclasses.replace(record, incarnation="next") for record in deployment.records]
    await deployment.announce()
    await eventually(lambda: {view.record.incarnation for view in deployment.queue.views} == {"next"})
    assert await queue_class() == "long"


async def test_an_echo_comes_before_the_output_and_is_no_part_of_its_ids(deployment: Deployment) -> None:
    deployment.script.answer = deployment.tokenizer.encode(" blue and wide")
    text = "The sky  is: 漢"
    echoed = await deployment.stub.Complete(
        gateway_pb2.GenerateRequest(text=text, echo=True, stop=common_pb2.StopConditions(strings=["sky"]))
    )
    assert echoed.text == text + " blue and wide"
    assert list(echoed.token_ids) == deployment.script.answer
    assert echoed.finished.usage.completion_tokens == len(deployment.script.answer)
    ids = common_pb2.TokenIds(ids=[1, *deployment.tokenizer.encode(text)])
    assert (await deployment.stub.Complete(gateway_pb2.GenerateRequest(token_ids=ids, echo=True))).text == echoed.text
    silent = await deployment.stub.Complete(gateway_pb2.GenerateRequest(text=text, echo=False))
    assert silent.text == " blue and wide"
