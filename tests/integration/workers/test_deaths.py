"""What a worker's death, stall or shutdown does to others: they are told, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import UnavailableError
from baton.core.ids import new_attempt_id
from baton.rpc.errors import from_call
from baton.v1 import kv_transfer_pb2
from tests.integration.workers.conftest import start
from tests.integration.workers.harness import WITHIN_S, WorkerProcess
from tests.integration.workers.test_slow_reader import all_seats_taken

if TYPE_CHECKING:
    from tests.integration.workers.harness import Client, Pair

PROMPT = list(range(1, 60))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def ends(pid: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while is_running(pid):
            await asyncio.sleep(0.02)


async def read_to_error(call: Any) -> grpc.aio.AioRpcError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


async def start_decode(
    client: Client, attempt_id: str, prompt: list[int] = PROMPT, max_tokens: int = 2000
) -> tuple[Any, Any]:
    """A request whose tokens flow, but not far unless they are read: its two calls."""
    prefill = client.prefill.Prefill(client.prefill_request(attempt_id, prompt, max_tokens=max_tokens))
    first = await client.first_token(prefill)
    decode = client.slow_decode.Decode(client.decode_request(attempt_id, first, max_tokens=max_tokens))
    assert (await decode.read()).HasField("handover")
    assert (await decode.read()).HasField("tokens")
    return prefill, decode


async def hold(pair: Pair, client: Client) -> Any:
    """A prefill call whose prompt is done, with its blocks held, for the engine stands still."""

    async def is_free() -> bool:
        return (await client.status())[0].num_used_blocks == 0

    while True:
        await client.eventually(is_free)
        call = client.prefill.Prefill(client.prefill_request(f"held-{new_attempt_id()}", PROMPT))
        await client.first_token(call)
        pair.prefill.freeze(server=False)
        if (await client.status())[0].num_used_blocks:
            return call
        pair.prefill.thaw()  # its lease has ended meanwhile


async def assert_works(pair: Pair, attempt_id: str) -> None:
    async with pair.client() as client:
        answer = await client.generate(attempt_id, PROMPT, max_tokens=5)
        assert len(answer.tokens) == 5
        await client.assert_all_free()


async def test_a_killed_prefill_engine_fails_its_calls_and_leaves_no_segment(pair):
    async with pair.client() as client:
        segment = pair.prefill.segment
        finished, running = await start_decode(client, "running", max_tokens=1000)
        assert (await finished.read()).HasField("released")
        held = await hold(pair, client)
        os.kill(pair.prefill.engine_pid, signal.SIGKILL)
        failure = from_call(await read_to_error(held))
        assert failure.reason == "ENGINE_DIED"
        assert await asyncio.to_thread(pair.prefill.wait) == 1
        assert "SIGKILL" in pair.prefill.log
        assert not segment.exists()
        # What had been handed over does not notice.
        while not (event := await running.read()).HasField("finished"):
            assert event.HasField("tokens")
    start(pair.prefill)
    await assert_works(pair, "after-prefill-engine")


async def test_a_killed_decode_engine_fails_its_calls_and_frees_the_source(pair):
    async with pair.client() as client:
        prefill, decode = await start_decode(client, "running")
        assert (await prefill.read()).HasField("released")
        os.kill(pair.decode.engine_pid, signal.SIGKILL)
        error = await read_to_error(decode)
        assert (error.code(), from_call(error).reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED")
        assert await asyncio.to_thread(pair.decode.wait) == 1
    start(pair.decode)
    await assert_works(pair, "after-decode-engine")


async def test_a_killed_prefill_server_takes_its_engine_and_its_segment_along(pair):
    async with pair.client() as client:
        engine_pid, segment = pair.prefill.engine_pid, pair.prefill.segment
        held = await hold(pair, client)
        pair.prefill.kill()
        assert (await read_to_error(held)).code() is grpc.StatusCode.UNAVAILABLE
        await ends(engine_pid)
        assert not segment.exists()
    start(pair.prefill)
    await assert_works(pair, "after-prefill-server")


async def test_a_killed_decode_server_loses_its_leases_by_expiry(pair):
    async with pair.client() as client, all_seats_taken(client) as hogs:
        prefill = client.prefill.Prefill(client.prefill_request("waits", PROMPT))
        first = await client.first_token(prefill)
        waits = client.decode.Decode(client.decode_request("waits", first))
        reading = asyncio.create_task(waits.read())

        async def is_waiting() -> bool:
            return (await client.status())[1].num_waiting == 1

        await client.eventually(is_waiting)
        engine_pid = pair.decode.engine_pid
        pair.decode.kill()
        async with asyncio.timeout(WITHIN_S):
            assert (await prefill.read()).released.outcome == kv_transfer_pb2.LEASE_OUTCOME_EXPIRED
        await ends(engine_pid)
        await asyncio.gather(reading, *map(read_to_error, hogs), return_exceptions=True)
    start(pair.decode)
    await assert_works(pair, "after-decode-server")


async def test_health_follows_progress(pair):
    async with pair.client() as client:
        health = health_pb2_grpc.HealthStub(client.channels[0]).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine_pid = pair.prefill.engine_pid
        os.kill(engine_pid, signal.SIGSTOP)
        try:
            call = client.prefill.Prefill(client.prefill_request("stuck", PROMPT))
            call_reads = asyncio.create_task(client.first_token(call))
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            os.kill(engine_pid, signal.SIGCONT)
        await call_reads
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        call.cancel()
        health.cancel()
        await client.assert_all_free()


async def test_a_stalled_and_emptied_redis_touches_nothing_that_runs(pair):
    async with pair.client() as client:
        health = health_pb2_grpc.HealthStub(client.channels[0])
        pair.redis.pause()
        try:
            answer = await client.generate("while-away", PROMPT)
            assert len(answer.tokens) == 8
            status = (await health.Check(health_pb2.HealthCheckRequest())).status
            assert status == health_pb2.HealthCheckResponse.SERVING
        finally:
            pair.redis.resume()
        assert pair.redis.ask("FLUSHALL").startswith(b"+OK")

        async def is_back() -> bool:
            with contextlib.suppress(UnavailableError):
                return len(await client.registry.workers()) == 2
            return False

        await client.eventually(is_back)


async def test_shutdown_lets_what_runs_end_and_refuses_the_rest(pair):
    async with pair.client() as client:
        prefill, decode = await start_decode(client, "running", max_tokens=300)
        engine_pid = pair.decode.engine_pid
        pair.decode.terminate()
        while (event := await decode.read()) is not grpc.aio.EOF and not event.HasField("finished"):
            assert event.HasField("tokens")
        assert event is not grpc.aio.EOF
        assert (await prefill.read()).HasField("released")
        assert await asyncio.to_thread(pair.decode.wait) == 0
        assert not is_running(engine_pid)
        segment = pair.prefill.segment
        pair.prefill.terminate()
        assert await asyncio.to_thread(pair.prefill.wait) == 0
        assert not segment.exists()

        async def are_gone() -> bool:
            return await client.registry.workers() == ()

        await client.eventually(are_gone)


@pytest.mark.parametrize("package", ["prefill_worker", "decode_worker"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--redis.url", "redis://127.0.0.1:1/0"], ["redis.url", "127.0.0.1:1"]),
        (["--model.path", "/nonexistent"], ["/nonexistent"]),
        (["--engine.num_threads", "0"], ["engine.num_threads", "0"]),
    ],
)
async def test_a_start_that_fails_says_why_in_one_line(pair, tmp_path, package, flags, words):
    worker = WorkerProcess(package, "broken", pair.redis.url, pair.model, tmp_path)
    worker.start(*flags)
    assert await asyncio.to_thread(worker.wait) == 1
    lines = [line for line in worker.log.splitlines() if line.startswith(f"{package}: ")]
    assert len(lines) == 1, worker.log
    assert all(word in lines[0] for word in words)
    assert "Traceback" not in worker.log
