"""A whole system of real processes for the tests that kill parts of it, and its streams as clients see them."""

from __future__ import annotations

import asyncio
import contextlib
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
from baton.rpc.errors import from_call
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.integration.workers.harness import (
    LEASE_S,
    MODEL,
    NAMESPACE,
    WITHIN_S,
    GatewayProcess,
    WorkerProcess,
    stop_all,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.fixtures.redis import PrivateRedis

WAYS = ("shm", "grpc", "gloo")
START_S = 600.0
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
    is_refused: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_refused or self.finished is not None

    async def read(self) -> None:
        """Reads to the end. Where Redis is kept from answering for a second no attempt can follow a lost one."""
        try:
            await self._read()
        except grpc.aio.AioRpcError as error:
            if from_call(error).reason != "REDIS_UNAVAILABLE":
                raise
            self.is_refused = True

    async def _read(self) -> None:
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


class TooBusyError(Exception):
    """The machine has so much to do that Redis did not answer in time: nothing was shown."""


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
            flags = ["--engine.kv_cache_bytes", "12MiB", "--engine.max_num_seqs", "8", "--stall_s", "300"]
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
                await client.all_run()
                yield client
        finally:
            await connection.close()


async def eventually(holds: Callable[[], Any], *, within_s: float = WITHIN_S) -> None:
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
    addresses: dict[str, str] = field(default_factory=dict)

    async def all_run(self) -> None:
        """Starts whoever was killed, and waits until everybody knows everybody."""
        for worker in self.system.workers.values():
            worker.thaw()
        await eventually(self.sees_all, within_s=START_S)

    async def sees_all(self) -> bool:
        self.system.start(*(name for name, worker in self.system.workers.items() if not worker.is_running))
        with contextlib.suppress(UnavailableError, grpc.aio.AioRpcError):  # who starts may take all cores for a second
            alive = {view.record.worker_id: view.record for view in await self.registry.workers()}
            self.addresses = {name: record.address for name, record in alive.items()}
            if alive.keys() >= self.system.workers.keys():
                seen = (await self.stub.GetStatus(gateway_pb2.GetStatusRequest())).workers
                lives = {status.incarnation for status in seen}
                # A worker that was killed a moment ago is still listed.
                return all(record.incarnation in lives for record in alive.values()) and bool(await self.statuses())
        return False

    async def statuses(self) -> dict[str, common_pb2.WorkerStatus]:
        """What each living worker says of itself."""
        found = {}
        for name, address in self.addresses.items():
            if self.system.workers[name].is_running:
                async with grpc.aio.insecure_channel(address) as channel:
                    if name.startswith("p"):
                        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
                        answer = await stub.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest(), timeout=60)
                    else:
                        stub = decode_pb2_grpc.DecodeServiceStub(channel)
                        answer = await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=60)
                found[name] = answer.worker
        return found

    async def granted(self) -> dict[str, int]:
        """For how many sequences each worker was chosen that are not over there."""
        while True:
            with contextlib.suppress(UnavailableError):
                views = {view.record.worker_id: view.granted_seqs for view in await self.registry.workers()}
                if views.keys() >= self.system.workers.keys():  # a heartbeat may be late
                    return views
            await asyncio.sleep(0.02)

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[list[Stream]]:
        """All requests at once; after the block each has ended as it does undisturbed, and nothing is held.

        TooBusyError when one was refused.
        """
        streams = [Stream(self.stub.Generate(each)) for each in REQUESTS]
        async with asyncio.timeout(START_S), asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.read())
            yield streams
        for stream, expected in zip(streams, self.system.expected, strict=True):
            if not stream.is_refused:
                stream.assert_as(expected)
        await eventually(self.all_free)
        if any(stream.is_refused for stream in streams):
            raise TooBusyError

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

    def num_retries(self) -> int:
        return self.system.gateway.log.count("a worker was lost")


async def status_of(client: Client, name: str) -> common_pb2.WorkerStatus:
    """What a decode worker says of itself."""
    async with grpc.aio.insecure_channel(client.addresses[name]) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        return (await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())).worker
