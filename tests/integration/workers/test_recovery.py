"""Real workers are killed under a real gateway: every stream is what it would have been, and nothing stays held.

Two prefill workers, which can be read in every way, and three decode workers, one for each way that runs without a
device. Seven different requests run at a time, two or three on each decode worker as a rule.

Nothing makes the requests wait for the tests, so a disturbance can come too late: then the test is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.model import save_steep_llama
from tests.fixtures.redis import PrivateRedis
from tests.integration.workers.recovery_system import (
    REQUESTS,
    WAYS,
    Client,
    Stream,
    System,
    TooBusyError,
    eventually,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from tests.integration.workers.harness import WorkerProcess

# Five workers start, and two of them again in each test and each time that it is repeated.
pytestmark = pytest.mark.timeout(900)
MAX_TRIES = 10


@pytest.fixture(scope="module")
def module_system(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model, folder = tmp_path_factory.mktemp("steep"), tmp_path_factory.mktemp("logs")
    save_steep_llama(model, model_folder)
    with PrivateRedis() as redis:
        system = System(redis, model, folder)
        try:
            # Two are killed in a test; on a machine with too much to do a lease may be lost beside that.
            system.gateway.start("--limits.max_retries", "10")
            yield system
        finally:
            system.stop()


@pytest.fixture
async def client(module_system: System) -> AsyncIterator[Client]:
    """All workers running; the streams that an undisturbed system gives are known."""
    async with module_system.client() as client:
        while not module_system.expected:
            streams = [Stream(client.stub.Generate(each)) for each in REQUESTS]
            await asyncio.gather(*(stream.read() for stream in streams))
            if any(stream.is_refused for stream in streams):
                continue
            module_system.expected = streams
            assert re.fullmatch("([a-z]{2,5} )+[a-z]*", streams[3].text)
        yield client
        for worker in module_system.workers.values():
            worker.thaw()


def until_caught(body: Callable[[Client], Awaitable[bool]]) -> Callable[[Client], Awaitable[None]]:
    """Repeats a test until its disturbance has met what it was to meet, as `body` says. All else it asserts."""

    @functools.wraps(body)
    async def test(client: Client) -> None:
        for _ in range(MAX_TRIES):
            with contextlib.suppress(TooBusyError):
                if await body(client):
                    return
            await client.all_run()
        raise AssertionError(f"{MAX_TRIES} times too late")

    return test


def decodes(client: Client, *ways: str) -> list[WorkerProcess]:
    return [client.system.workers[f"d-{way}"] for way in ways]


def are_over(streams: list[Stream]) -> bool:
    return all(stream.is_over for stream in streams)


async def first_tokens(streams: list[Stream], count: int = 1) -> None:
    async def are_here() -> bool:
        return all(len(stream.ids) >= count or stream.is_refused for stream in streams)

    await eventually(are_here)


@until_caught
async def test_decode_workers_die_in_the_middle_of_their_streams(client: Client) -> bool:
    before = client.num_retries()
    victims = {name: client.system.workers[name] for name in ("d-shm", "d-gloo")}
    stopped: set[str] = set()

    async def have_stopped() -> bool:
        # Each as soon as it generates: the longest prompt's worker begins when others may have ended.
        for name in victims.keys() - stopped:
            if (await status_of(client, name)).num_running:
                victims[name].freeze(server=False)
                if (await status_of(client, name)).num_running:
                    stopped.add(name)
                else:
                    victims[name].thaw()
        missing = victims.keys() - stopped
        if not missing:
            return True
        # Too late for one that has nothing left to do, or never had.
        grants = await client.granted()
        return all(stream.ids or stream.is_refused for stream in streams) and not any(grants[name] for name in missing)

    async with client.streams() as streams:
        await eventually(have_stopped)
        for worker in victims.values():
            worker.kill()
    assert client.num_retries() - before >= len(stopped)
    return stopped == victims.keys()


@until_caught
async def test_decode_workers_die_before_and_within_the_copy(client: Client) -> bool:
    prefills = [client.system.workers[name] for name in ("p1", "p2")]
    before = client.num_retries()
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    async with client.streams() as streams:
        await first_tokens(streams)
        for worker in prefills:
            worker.freeze()
        # These begin to copy from sources that do not answer; the third one has not begun.
        for worker in decodes(client, "grpc", "gloo"):
            worker.thaw()
        is_caught = await copies_or_gives_up(client, before)
        for worker in decodes(client, "shm", "gloo"):
            worker.kill()
        for worker in prefills:
            worker.thaw()
    return is_caught and client.num_retries() - before >= 2


async def copies_or_gives_up(client: Client, num_retries: int) -> bool:
    """Waits until two decode workers copy, which is True, or the sources are given up for their silence."""
    is_caught = False

    async def is_so() -> bool:
        nonlocal is_caught
        is_caught = all([await _copies(client, name) for name in ("d-grpc", "d-gloo")])
        return is_caught or client.num_retries() > num_retries

    await eventually(is_so)
    return is_caught


async def _copies(client: Client, name: str) -> bool:
    """Whether the engine has taken in what it is asked for."""
    status = await status_of(client, name)
    return status.num_waiting > 0 and status.num_used_blocks > 0


@until_caught
async def test_decode_workers_die_while_the_cache_grows(client: Client) -> bool:
    prefills = [client.system.workers[name] for name in ("p1", "p2")]
    before = client.num_retries()
    async with client.streams() as streams:

        async def some_have_begun() -> bool:
            statuses = await client.statuses()
            return are_over(streams) or any(each.num_used_blocks for name, each in statuses.items() if name[0] == "d")

        await eventually(some_have_begun)
        for worker in prefills:
            worker.freeze(server=False)
        statuses = await client.statuses()
        for name in [name for name, status in statuses.items() if name[0] == "d" and status.num_used_blocks][:2]:
            client.system.workers[name].kill()
        for worker in prefills:
            worker.thaw()
    return any(statuses[name].num_running for name in ("p1", "p2")) and client.num_retries() > before


async def freeze_within_the_copy(client: Client, streams: list[Stream]) -> tuple[WorkerProcess, WorkerProcess, bool]:
    """Both prefill workers stand still while they are read; the one that more are reading comes first."""
    before = client.num_retries()
    await first_tokens(streams)
    # Which one has which prompt falls by lot; the one with the longest prompt has few others.
    grants = await client.granted()
    busier, other = (client.system.workers[name] for name in sorted(("p1", "p2"), key=lambda name: -grants[name]))
    for worker in (busier, other):
        worker.freeze()
    for worker in decodes(client, *WAYS):
        worker.thaw()
    return busier, other, await copies_or_gives_up(client, before)


@until_caught
async def test_a_prefill_worker_dies_within_the_copy(client: Client) -> bool:
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    before = client.num_retries()
    async with client.streams() as streams:
        busier, other, is_caught = await freeze_within_the_copy(client, streams)
        busier.kill()
        other.thaw()
    return is_caught and client.num_retries() > before


@until_caught
async def test_a_prefill_worker_stalls_within_the_copy(client: Client) -> bool:
    """It is left for the other one, and when it goes on it frees what nobody wants any more."""
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    before = client.num_retries()
    async with client.streams() as streams:
        busier, other, is_caught = await freeze_within_the_copy(client, streams)
        other.thaw()

        async def are_left() -> bool:
            return client.num_retries() > before or are_over(streams)

        await eventually(are_left)
        busier.thaw()
    return is_caught and client.num_retries() > before


@until_caught
async def test_a_prefill_worker_dies_before_the_first_token(client: Client) -> bool:
    before = client.num_retries()
    client.system.workers["p1"].freeze(server=False)
    async with client.streams() as streams:

        async def some_run() -> bool:
            has_prompts = (await client.granted())["p1"] > 0
            return are_over(streams) or (has_prompts and any(stream.ids for stream in streams))

        await eventually(some_run)
        client.system.workers["p1"].kill()
    return client.num_retries() > before


@until_caught
async def test_nobody_notices_the_death_of_a_prefill_worker_whose_caches_were_taken_over(client: Client) -> bool:
    async with client.streams() as streams:
        await first_tokens(streams, 2)
        before = client.num_retries()
        os.kill(client.system.workers["p2"].engine_pid, signal.SIGKILL)
    assert client.num_retries() == before
    return True
