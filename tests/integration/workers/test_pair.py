"""A prefill and a decode worker as processes: right tokens, every end of a request, and no block left behind."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import FailedPreconditionError, InvalidArgumentError, OutOfRangeError
from baton.rpc.errors import from_call
from baton.v1 import common_pb2, decode_pb2, kv_transfer_pb2
from tests.integration.workers.harness import BLOCK_SIZE, LEASE_S, MAX_CONTEXT, VOCAB_SIZE
from tests.integration.workers.test_slow_reader import all_seats_taken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.workers.harness import Client

CONSUMED = kv_transfer_pb2.LEASE_OUTCOME_CONSUMED
ABANDONED = kv_transfer_pb2.LEASE_OUTCOME_ABANDONED
EXPIRED = kv_transfer_pb2.LEASE_OUTCOME_EXPIRED


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * index + 13 * salt + index * index) % VOCAB_SIZE for index in range(length)]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Iterator[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    # Threads that wait for each other by spinning crawl when the workers need the cores.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager").eval()

    def tokens(token_ids: list[int], count: int) -> list[int]:
        ids = torch.tensor([token_ids])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        continued: list[int] = output[0, len(token_ids) :].tolist()
        return continued

    yield tokens
    torch.set_num_threads(num_threads)


async def test_tokens_equal_transformers_alone_and_all_at_once(pair, reference):
    prompts = [prompt(length, salt) for salt, length in enumerate((1, 15, 16, 17, 40, 200, 600))]
    expected = [reference(token_ids, 20) for token_ids in prompts]
    async with pair.client() as client:
        alone = await client.generate("alone", prompts[3], max_tokens=20)
        assert alone.tokens == expected[3]
        answers = await asyncio.gather(
            *(client.generate(f"all-{index}", ids, max_tokens=20) for index, ids in enumerate(prompts))
        )
        assert [answer.tokens for answer in answers] == expected
        assert {answer.outcome for answer in answers} == {CONSUMED}
        long = answers[-1]
        assert long.prefill_events[1].first_token.num_chunks >= 2
        handover = long.decode_events[0].handover
        num_blocks = -(-600 // BLOCK_SIZE)
        assert (handover.transport, handover.num_bytes) == ("shm", num_blocks * 3 * 2 * BLOCK_SIZE * 2 * 8 * 4)
        assert long.decode_events[-1].finished == decode_pb2.DecodeFinished(
            reason=common_pb2.FINISH_REASON_LENGTH, num_steps=19
        )
        await client.assert_all_free()


async def test_a_shared_beginning_is_computed_once_and_changes_no_token(pair, reference):
    beginning = prompt(100, 50)
    prompts = [[*beginning, *prompt(length, length)] for length in (5, 30, 44)]
    async with pair.client() as client:
        answers = [
            await client.generate(f"shared-{index}", ids, max_tokens=12, cache_salt="one")
            for index, ids in enumerate([*prompts, prompts[0]])
        ]
        assert [answer.tokens for answer in answers] == [reference(ids, 12) for ids in [*prompts, prompts[0]]]
        cached = [answer.prefill_events[1].first_token.cached_tokens for answer in answers]
        assert cached == [0, 96, 96, 96]
        # While several read the same blocks at once, each under a lease of its own.
        again = await asyncio.gather(
            *(client.generate(f"again-{index}", prompts[2], max_tokens=12, cache_salt="one") for index in range(6))
        )
        assert all(answer.tokens == answers[2].tokens for answer in again)
        assert {answer.prefill_events[1].first_token.cached_tokens for answer in again} == {128}
        other = await client.generate("other", prompts[0], max_tokens=12, cache_salt="two")
        assert other.prefill_events[1].first_token.cached_tokens == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate("salted", prompts[0], cache_salt="x" * 129)
        assert from_call(caught.value).field == "cache_salt"
        await client.assert_all_free()


async def test_a_first_token_that_is_the_last_keeps_no_cache(pair, reference):
    expected = reference(prompt(20), 1)
    async with pair.client() as client:
        by_length = await client.generate("by-length", prompt(20), max_tokens=1)
        by_stop = await client.generate("by-stop", prompt(20), stop_token_ids=expected)
        assert by_length.tokens == by_stop.tokens == expected
        assert by_length.prefill_events[1].first_token.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert by_stop.prefill_events[1].first_token.finish_reason == common_pb2.FINISH_REASON_STOP
        await client.assert_all_free()


async def test_a_stop_token_ends_the_decode(pair, reference):
    expected = reference(prompt(20), 8)
    stop = expected[3]
    async with pair.client() as client:
        answer = await client.generate("stops", prompt(20), stop_token_ids=[stop])
        assert answer.tokens == expected[: expected.index(stop) + 1]
        assert answer.decode_events[-1].finished.reason == common_pb2.FINISH_REASON_STOP
        await client.assert_all_free()


async def test_a_cancelled_prefill_frees_its_blocks_while_computing_and_while_held(pair):
    async with pair.client() as client:
        call = client.prefill.Prefill(client.prefill_request("cancel-1", prompt(2000)))
        assert (await call.read()).HasField("started")
        call.cancel()
        await client.assert_all_free()
        for number in range(50):
            sent_s = time.monotonic()
            call = client.prefill.Prefill(client.prefill_request(f"held-{number}", prompt(100)))
            await client.first_token(call)
            call.cancel()
            await client.assert_all_free()
            if time.monotonic() - sent_s < LEASE_S:  # so it was not the end of the lease that has freed them
                break
        else:
            raise AssertionError("held as long as a lease lasts")


async def test_a_lease_that_nobody_takes_expires_while_the_worker_is_idle(pair):
    async with pair.client() as client:
        call = client.prefill.Prefill(client.prefill_request("expires", prompt(50)))
        first = await client.first_token(call)
        last = await call.read()
        assert last.released.outcome == EXPIRED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.decode.Decode(client.decode_request("expires", first)):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert from_call(caught.value).reason == "LEASE_STALE"
        await client.assert_all_free()


async def test_a_cancelled_decode_leaves_the_batch_and_the_others_go_on(pair, reference):
    async with pair.client() as client:
        prefill = client.prefill.Prefill(client.prefill_request("victim", prompt(30), max_tokens=900))
        first = await client.first_token(prefill)
        decode = client.decode.Decode(client.decode_request("victim", first, max_tokens=900))
        assert (await decode.read()).HasField("handover")
        assert (await decode.read()).HasField("tokens")
        decode.cancel()
        assert (await prefill.read()).released.outcome == CONSUMED
        other = await client.generate("other", prompt(30, 1), max_tokens=30)
        assert other.tokens == reference(prompt(30, 1), 30)
        await client.assert_all_free()


async def refused(client: Client, attempt_id: str, **changes: Any) -> tuple[Any, Any]:
    """Prefills, has Decode refuse, and returns its error and how the lease ended."""
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, prompt(50)))
    first = await client.first_token(prefill)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in client.decode.Decode(client.decode_request(attempt_id, first, **changes)):
            pass
    return from_call(caught.value), (await prefill.read()).released.outcome


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"max_tokens": 1}, InvalidArgumentError, "INVALID_ARGUMENT"),
        ({"max_tokens": MAX_CONTEXT}, OutOfRangeError, "CONTEXT_EXCEEDED"),
        ({"max_tokens": 3000}, OutOfRangeError, "KV_POOL_EXCEEDED"),
        ({"first_token_id": VOCAB_SIZE}, OutOfRangeError, "TOKEN_OUT_OF_VOCABULARY"),
        (
            {"fingerprint": common_pb2.ModelFingerprint(model="tiny", tokenizer="b2" * 16)},
            FailedPreconditionError,
            "FINGERPRINT_MISMATCH",
        ),
    ],
)
async def test_a_decode_that_is_refused_releases_the_source_at_once(pair, changes, error, reason):
    async with pair.client() as client:
        failure, outcome = await refused(client, f"refused-{reason}-{changes.get('max_tokens')}", **changes)
        assert (type(failure), failure.reason) == (error, reason)
        assert outcome == ABANDONED
        await client.assert_all_free()


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"attempt_id": ""}, InvalidArgumentError, "attempt_id"),
        ({"token_ids": []}, InvalidArgumentError, "token_ids"),
        ({"token_ids": [VOCAB_SIZE]}, OutOfRangeError, "token_ids"),
        ({"token_ids": [1] * MAX_CONTEXT}, OutOfRangeError, "token_ids"),
        ({"max_tokens": 0}, InvalidArgumentError, "max_tokens"),
        ({"max_tokens": MAX_CONTEXT}, OutOfRangeError, "max_tokens"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1)}, InvalidArgumentError, "sampling.temperature"),
        (
            {"sampling": common_pb2.SamplingParams(temperature=float("nan"))},
            InvalidArgumentError,
            "sampling.temperature",
        ),
        ({"sampling": common_pb2.SamplingParams(top_p=0)}, InvalidArgumentError, "sampling.top_p"),
        ({"fingerprint": common_pb2.ModelFingerprint()}, InvalidArgumentError, "fingerprint.model"),
        (
            {"fingerprint": common_pb2.ModelFingerprint(model="tiny", tokenizer="another")},
            InvalidArgumentError,
            "fingerprint.tokenizer",
        ),
    ],
)
async def test_a_bad_prefill_names_the_field(pair, changes, error, field):
    async with pair.client() as client:
        request = client.prefill_request("bad", prompt(5))
        for name, value in changes.items():
            request.ClearField(name)
            if isinstance(value, list):
                getattr(request, name).extend(value)
            elif hasattr(value, "SerializeToString"):
                getattr(request, name).CopyFrom(value)
            else:
                setattr(request, name, value)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.prefill.Prefill(request):
                pass
        failure = from_call(caught.value)
        assert type(failure) is error
        assert failure.field == field


async def test_an_attempt_that_runs_keeps_its_id(pair):
    async with pair.client() as client:
        prefill = client.prefill.Prefill(client.prefill_request("twice", prompt(10)))
        await client.first_token(prefill)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.first_token(client.prefill.Prefill(client.prefill_request("twice", prompt(10))))
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        prefill.cancel()
        await client.assert_all_free()


async def test_decode_waits_for_its_turn_and_its_lease_lives_on(pair, reference):
    """As long as all seats are taken, beyond the end of its first lease."""
    async with pair.client() as client, all_seats_taken(client) as hogs:
        ids = prompt(700, 2)
        prefill = client.prefill.Prefill(client.prefill_request("waits", ids, max_tokens=810))
        first = await client.first_token(prefill)
        call = client.decode.Decode(client.decode_request("waits", first, max_tokens=810))
        waiting = asyncio.create_task(call.read())

        async def is_waiting() -> bool:
            return (await client.status())[1].num_waiting == 1

        await client.eventually(is_waiting)
        await asyncio.sleep(1.5 * LEASE_S)  # the time is the point: nothing happens at its end
        assert not waiting.done()
        # Longer than `stall_s`: but nothing can be done, so nobody is to take the worker for stuck.
        assert [status.state for status in await client.status()] == [common_pb2.WORKER_STATE_READY] * 2
        for hog in hogs:
            hog.cancel()
        assert (await waiting).handover.wait_s > 1.4 * LEASE_S
        assert (await prefill.read()).released.outcome == CONSUMED
        tokens = [first.token_id]
        while len(tokens) < 10:
            tokens += (await call.read()).tokens.ids
        assert tokens[:10] == reference(ids, 10)
        call.cancel()
        await client.assert_all_free()


async def test_status_and_registry_tell_the_same(pair):
    async with pair.client() as client:
        for status, worker in zip(await client.status(), (pair.prefill, pair.decode), strict=True):
            record = client.views[worker.worker_id].record
            assert (status.worker_id, status.incarnation) == (record.worker_id, record.incarnation)
            assert (status.num_blocks, status.block_size_tokens) == (record.num_blocks, record.block_size)
            assert status.state == common_pb2.WORKER_STATE_READY


async def test_health_is_serving_for_each_service(pair):
    async with pair.client() as client:
        names = ("baton.v1.PrefillService", "baton.v1.DecodeService")
        for channel, name in zip(client.channels, names, strict=True):
            for service in ("", name):
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
