"""Workers of several ranks: the same tokens, handovers between any numbers of ranks, and nothing left when they end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from baton.coordination.embedded import EmbeddedRedis
from baton.rpc.errors import from_call
from tests.fixtures.processes import descendants
from tests.integration.engine import families
from tests.integration.workers.harness import Pair, WorkerProcess, stop_all
from tests.integration.workers.test_deaths import ends, read_to_error, start_decode

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = [[(7 * i + k) % 200 + 1 for i in range(150 - 40 * k)] for k in range(3)]


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as redis:
        yield redis


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    reference = families.reference_model(tiny_model)
    return [families.reference_tokens(reference, prompt, 12) for prompt in PROMPTS]


@pytest.fixture
def pair(redis: EmbeddedRedis, tiny_model: Path, tmp_path: Path) -> Iterator[Pair]:
    workers = [WorkerProcess(f"{role}_worker", role, redis.url, tiny_model, tmp_path) for role in ("prefill", "decode")]
    yield Pair(*workers, redis, tiny_model)
    stop_all(workers)


def start(pair: Pair, prefill_ranks: int, decode_ranks: int) -> None:
    for worker, ranks in ((pair.prefill, prefill_ranks), (pair.decode, decode_ranks)):
        worker.start("--engine.kv_cache_bytes", "2MiB", "--engine.tensor_parallel_size", str(ranks))


def rank_pids(worker: WorkerProcess) -> list[int]:
    return [pid for pid, command in descendants(worker.pid).items() if " rank-" in command]


async def generate_all(client, expected: list[list[int]]) -> None:
    answers = [await client.generate(f"request-{i}", prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    assert [answer.tokens for answer in answers] == expected
    assert {answer.decode_events[0].handover.transport for answer in answers} == {"shm"}
    together = [client.generate(f"together-{i}", prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    assert [answer.tokens for answer in await asyncio.gather(*together)] == expected
    await client.assert_all_free()


async def test_two_prefill_ranks_hand_over_to_one_decode_process(pair, expected):
    start(pair, 2, 1)
    async with pair.client() as client:
        await generate_all(client, expected)
        (rank,) = rank_pids(pair.prefill)
        segment = pair.prefill.segment
        assert str(segment) in Path(f"/proc/{rank}/maps").read_text()
        processes = [*descendants(pair.prefill.pid)]
        pair.prefill.terminate()
        assert await asyncio.to_thread(pair.prefill.wait) == 0
        assert not segment.exists()
        for pid in processes:
            await ends(pid)


async def test_one_prefill_process_hands_over_to_two_decode_ranks(pair, expected):
    start(pair, 1, 2)
    async with pair.client() as client:
        await generate_all(client, expected)
        assert len(rank_pids(pair.decode)) == 1
        await start_decode(client, "running")
        processes = [*descendants(pair.decode.pid)]
        pair.decode.kill()
        for pid in processes:
            await ends(pid)


async def test_a_dead_rank_is_the_end_of_its_worker_in_a_step_and_at_rest(pair, expected):
    start(pair, 2, 2)
    async with pair.client() as client:
        await generate_all(client, expected)
        _, decode = await start_decode(client, "running")
        os.kill(*rank_pids(pair.decode), signal.SIGKILL)
        assert from_call(await read_to_error(decode)).reason == "ENGINE_DIED"
        os.kill(*rank_pids(pair.prefill), signal.SIGKILL)
        for worker in (pair.decode, pair.prefill):
            assert await asyncio.to_thread(worker.wait) == 1
            assert re.search(r"the worker ends: .*rank 1 of 2 was killed by SIGKILL", worker.log)
            assert "Traceback" not in worker.log


@pytest.mark.parametrize("package", ["prefill_worker", "decode_worker"])
async def test_what_cannot_be_divided_is_refused_in_one_line(redis, tiny_model, tmp_path, package):
    worker = WorkerProcess(package, "broken", redis.url, tiny_model, tmp_path)
    worker.start("--engine.tensor_parallel_size", "3")
    assert await asyncio.to_thread(worker.wait) == 1
    (line,) = [line for line in worker.log.splitlines() if line.startswith(f"{package}: ")]
    assert "engine.tensor_parallel_size: 3 ranks cannot divide the 2 KV heads of this model, at most 2 can" in line
