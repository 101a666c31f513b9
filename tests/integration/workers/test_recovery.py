"""Real workers are killed under a real gateway: every stream is what it would have been, and nothing stays held.

Two prefill workers, which can be read in every way, and three decode workers, one for each way that runs without a
device. Seven different requests run at a time, two or three on each decode worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from baton.coordination.client import connect
from baton.coordination.commands import Commands
from baton.coordination.keys import Keys
from baton.coordination.registry import WorkerRegistry
from baton.core.errors import UnavailableError
from baton.core.settings import RedisSettings
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.fixtures.model import save_steep_llama
from tests.fixtures.redis import PrivateRedis
from tests.integration.workers.harness import LEASE_S, MODEL, NAMESPACE, GatewayProcess, WorkerProcess, stop_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

WAYS = ("shm", "grpc", "gloo")
START_S = 120.0
# Five workers start, and two of them again in each test.
pytestmark = pytest.mark.timeout(400)
FREE_S = 20.0
MAX_TOKENS = 240
Sampling = common_pb2.SamplingParams


def prompt(salt: int, length: int = 170) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=[(37 * index + 101 * salt + index * index) % 40_000 + 20 for index in range(length)])


def request(salt: int, **changes: Any) -> gateway_pb2.GenerateRequest:
    fields = {
        "token_ids": prompt(salt),
        "sampling": Sampling(temperature=0),
        "stop": common_pb2.StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
    } | changes
    return gateway_pb2.GenerateRequest(**fields)


PENALTIES = Sampling(
    temperature=0.9, seed=11, top_k=6, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.3
)
REQUESTS = [
    request(1, token_ids=prompt(1, 30)),  # the only one of a single chunk
    request(2, token_ids=prompt(2, 1600), sampling=Sampling(temperature=1.1, seed=2**63 + 3, top_k=8)),
    request(3, sampling=PENALTIES),
    request(4, structure=common_pb2.Structure(regex="([a-z]{2,5} ){200}")),
    request(5, logprobs=common_pb2.LogprobOptions(output_top=2)),
    request(
        6,
        stop=common_pb2.StopConditions(max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS - 1, token_ids=range(20, 84)),
        sampling=Sampling(temperature=1, seed=8, top_k=8),
    ),
    request(7, n=2, sampling=Sampling(temperature=0.9, seed=21, top_k=8)),
]


@dataclass
class Stream:
    """One client's stream as it grows; of a second choice the ids and the text are apart."""

    call: Any
    ids: list[int] = field(default_factory=list)
    text: str = ""
    other_ids: list[int] = field(default_factory=list)
    other_text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finished: gateway_pb2.Finished | None = None

    async def read(self) -> None:
        """Reads to the end."""
        while (event := await self.call.read()) is not grpc.aio.EOF:
            if event.delta.choice:
                self.other_ids += event.delta.token_ids
                self.other_text += event.delta.text
                continue
            self.ids += event.delta.token_ids
            self.text += event.delta.text
            self.logprobs += [each.logprob for each in event.delta.logprobs]
            if event.HasField("finished"):
                self.finished = event.finished

    def assert_as(self, other: Stream) -> None:
        assert self.ids == other.ids
        assert self.text == other.text
        assert (self.other_ids, self.other_text) == (other.other_ids, other.other_text)
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert self.finished.reason == other.finished.reason
        assert self.finished.usage.prompt_tokens == other.finished.usage.prompt_tokens
        assert self.finished.usage.completion_tokens == other.finished.usage.completion_tokens


class System:
    """The processes, and what a test asks of them."""

    def __init__(self, redis: PrivateRedis, model: Path, folder: Path) -> None:
        self.redis = redis
        names = {"p1": "prefill_worker", "p2": "prefill_worker"} | {f"d-{way}": "decode_worker" for way in WAYS}
        self.workers = {name: WorkerProcess(kind, name, redis.url, model, folder) for name, kind in names.items()}
        self.gateway = GatewayProcess(redis.url, model, folder)
        self.expected: list[Stream] = []

    def start(self, *names: str) -> None:
        for name in names:
            flags = ["--engine.kv_cache_bytes", "12MiB", "--engine.max_num_seqs", "8", "--stall_s", "20"]
            if name.startswith("p"):
                flags += ["--lease.lease_s", str(LEASE_S), "--handover.transports", ",".join(WAYS)]
                flags += ["--engine.max_num_batched_tokens", "64", "--no-prefix_cache"]
            else:
                flags += ["--handover.transports", name.removeprefix("d-")]
            self.workers[name].start(*flags, "--handover.timeout_s", "10")

    def stop(self) -> None:
        stop_all(self.workers.values())
        self.gateway.stop()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client, when all workers are there; whoever was killed is started again."""
        self.start(*(name for name, worker in self.workers.items() if not worker.is_running))
        keys = Keys(NAMESPACE, MODEL)
        connection = await connect(RedisSettings(url=self.redis.url), keys)
        try:
            async with grpc.aio.insecure_channel(await asyncio.to_thread(self.gateway.wait_address)) as channel:
                client = Client(
                    self,
                    WorkerRegistry(connection, keys),
                    Commands(connection, keys, timeout_s=5.0),
                    gateway_pb2_grpc.GatewayServiceStub(channel),
                )
                await eventually(client.sees_all, within_s=START_S)
                yield client
        finally:
            await connection.close()


async def eventually(holds: Callable[[], Any], *, within_s: float = 20.0) -> None:
    """Waits for the state of other processes, which have no event to wait for."""
    deadline_s = time.monotonic() + within_s
    while not await holds():
        assert time.monotonic() < deadline_s, holds
        await asyncio.sleep(0.02)


@dataclass
class Client:
    """What a user and an operator see."""

    system: System
    registry: WorkerRegistry
    commands: Commands
    stub: gateway_pb2_grpc.GatewayServiceStub

    async def sees_all(self) -> bool:
        with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):  # who starts may take all cores for a second
            alive = {view.record.worker_id: view.record for view in await self.registry.workers()}
            if alive.keys() >= self.system.workers.keys():
                seen = (await self.stub.GetStatus(gateway_pb2.GetStatusRequest())).workers
                lives = {status.incarnation for status in seen}
                # A worker that was killed a moment ago is still listed.
                return all(record.incarnation in lives for record in alive.values()) and bool(await self.statuses())
        return False

    async def statuses(self) -> dict[str, common_pb2.WorkerStatus]:
        """What each living worker says of itself."""
        found = {}
        for view in await self.registry.workers():
            name = view.record.worker_id
            if self.system.workers[name].is_running:
                async with grpc.aio.insecure_channel(view.record.address) as channel:
                    if name.startswith("p"):
                        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                        answer = await stub.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest(), timeout=5)
                    else:
                        stub = decode_pb2_grpc.DecodeServiceStub(channel)
                        answer = await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=5)
                found[name] = answer.worker
        return found

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[list[Stream]]:
        """All requests at once; after the block each has ended as it does undisturbed, and nothing is held."""
        streams = [Stream(self.stub.Generate(each)) for each in REQUESTS]
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.read())
            yield streams
        for stream, expected in zip(streams, self.system.expected, strict=True):
            stream.assert_as(expected)
        await eventually(self.all_free, within_s=FREE_S)

    async def all_free(self) -> bool:
        """No block is used, no credit is held, and the queue's sums agree."""
        with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):
            for status in (await self.statuses()).values():
                if status.num_used_blocks + status.num_running + status.num_waiting:
                    return False
            views = await self.registry.workers()
            held = [(view.granted_blocks, view.granted_seqs) for view in views]
            return all(each == (0, 0) for each in held) and await self.commands.call("audit") == []
        return False

    async def num_retries(self) -> int:
        return self.system.gateway.log.count("a worker was lost")


@pytest.fixture(scope="module")
def module_system(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    model, folder = tmp_path_factory.mktemp("steep"), tmp_path_factory.mktemp("logs")
    save_steep_llama(model, model_folder)
    with PrivateRedis() as redis:
        system = System(redis, model, folder)
        try:
            system.gateway.start()
            yield system
        finally:
            system.stop()


@pytest.fixture
async def client(module_system: System) -> AsyncIterator[Client]:
    """All workers running; the streams that an undisturbed system gives are known."""
    async with module_system.client() as client:
        if not module_system.expected:
            streams = [Stream(client.stub.Generate(each)) for each in REQUESTS]
            await asyncio.gather(*(stream.read() for stream in streams))
            module_system.expected = streams
            assert re.fullmatch("([a-z]{2,5} )+[a-z]*", streams[3].text)
        yield client
        for worker in module_system.workers.values():
            worker.thaw()


def decodes(client: Client, *ways: str) -> list[WorkerProcess]:
    return [client.system.workers[f"d-{way}"] for way in ways]


async def first_tokens(streams: list[Stream], count: int = 1) -> None:
    async def are_here() -> bool:
        return all(len(stream.ids) >= count for stream in streams)

    await eventually(are_here, within_s=60.0)


async def test_decode_workers_die_in_the_middle_of_their_streams(client: Client) -> None:
    before = await client.num_retries()
    victims = {"d-shm", "d-gloo"}
    stopped: set[str] = set()

    async def have_stopped() -> bool:
        # Each as soon as it generates: the longest prompt's worker begins when others may have ended.
        for name in victims - stopped:
            if (await status_of(client, name)).num_running:
                client.system.workers[name].freeze(server=False)
                stopped.add(name)
        return stopped == victims

    async with client.streams() as streams:
        await eventually(have_stopped, within_s=60.0)
        assert sum(stream.finished is None for stream in streams) >= len(victims)
        for name in victims:
            client.system.workers[name].kill()
    assert await client.num_retries() - before >= len(victims)


async def test_decode_workers_die_before_and_within_the_copy(client: Client) -> None:
    prefills = [client.system.workers[name] for name in ("p1", "p2")]
    before = await client.num_retries()
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    async with client.streams() as streams:
        await first_tokens(streams)
        for worker in prefills:
            worker.freeze()
        # These begin to copy from sources that do not answer; the third one has not begun.
        for worker in decodes(client, "grpc", "gloo"):
            worker.thaw()
        await eventually(lambda: is_copying(client, "d-grpc", "d-gloo"))
        for worker in decodes(client, "shm", "gloo"):
            worker.kill()
        for worker in prefills:
            worker.thaw()
    assert await client.num_retries() - before >= 2


async def is_copying(client: Client, *names: str) -> bool:
    """Whether the engines have taken in what they are asked for."""
    statuses = [client.system.workers[name] for name in names]
    return bool(statuses) and all([await _waits(client, name) for name in names])


async def _waits(client: Client, name: str) -> bool:
    status = await status_of(client, name)
    return status.num_waiting > 0 and status.num_used_blocks > 0


async def status_of(client: Client, name: str) -> common_pb2.WorkerStatus:
    """What a decode worker says of itself."""
    [view] = [view for view in await client.registry.workers() if view.record.worker_id == name]
    async with grpc.aio.insecure_channel(view.record.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        return (await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())).worker


async def test_decode_workers_die_while_the_cache_grows(client: Client) -> None:
    prefills = [client.system.workers[name] for name in ("p1", "p2")]
    before = await client.num_retries()
    async with client.streams():

        async def some_have_begun() -> bool:
            return any(status.num_used_blocks for name, status in (await client.statuses()).items() if name[0] == "d")

        await eventually(some_have_begun)
        for worker in prefills:
            worker.freeze(server=False)
        statuses = await client.statuses()
        for name in [name for name, status in statuses.items() if name[0] == "d" and status.num_used_blocks][:2]:
            client.system.workers[name].kill()
        for worker in prefills:
            worker.thaw()
    assert await client.num_retries() > before


async def freeze_within_the_copy(client: Client, streams: list[Stream]) -> tuple[WorkerProcess, WorkerProcess]:
    """Both prefill workers stand still while they are read; the one that more are reading comes first."""
    await first_tokens(streams)
    # Which one has which prompt falls by lot; the one with the longest prompt has few others.
    grants = {view.record.worker_id: view.granted_seqs for view in await client.registry.workers()}
    busier, other = (client.system.workers[name] for name in sorted(("p1", "p2"), key=lambda name: -grants[name]))
    for worker in (busier, other):
        worker.freeze()
    for worker in decodes(client, *WAYS):
        worker.thaw()
    await eventually(lambda: is_copying(client, "d-grpc", "d-gloo"))
    return busier, other


async def test_a_prefill_worker_dies_within_the_copy(client: Client) -> None:
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    before = await client.num_retries()
    async with client.streams() as streams:
        busier, other = await freeze_within_the_copy(client, streams)
        busier.kill()
        other.thaw()
    assert await client.num_retries() - before >= 1


async def test_a_prefill_worker_stalls_within_the_copy(client: Client) -> None:
    """It is left for the other one, and when it goes on it frees what nobody wants any more."""
    for worker in decodes(client, *WAYS):
        worker.freeze(server=False)
    before = await client.num_retries()
    async with client.streams() as streams:
        busier, other = await freeze_within_the_copy(client, streams)
        other.thaw()

        async def are_left() -> bool:
            return await client.num_retries() > before

        await eventually(are_left)
        busier.thaw()


async def test_a_prefill_worker_dies_before_the_first_token(client: Client) -> None:
    before = await client.num_retries()
    client.system.workers["p1"].freeze(server=False)
    async with client.streams() as streams:

        async def some_run() -> bool:
            return sum(stream.finished is not None or len(stream.ids) > 0 for stream in streams) >= 1

        await eventually(some_run)
        client.system.workers["p1"].kill()
    assert await client.num_retries() - before >= 1


async def test_nobody_notices_the_death_of_a_prefill_worker_whose_caches_were_taken_over(client: Client) -> None:
    before = await client.num_retries()
    async with client.streams() as streams:
        await first_tokens(streams, 2)
        os.kill(client.system.workers["p2"].engine_pid, signal.SIGKILL)
    assert await client.num_retries() == before
