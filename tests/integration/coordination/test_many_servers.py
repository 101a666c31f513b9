"""Redis as several servers: a cluster of three nodes, and a primary that a Sentinel watches over. All of them real."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from baton.coordination.client import connect
from baton.coordination.embedded import _find_binary
from baton.core.errors import StartupError, UnavailableError
from baton.core.launch import bound_to_this_process
from baton.core.settings import RedisSettings
from tests.fixtures.coordination import KEYS, open_stage, ticket
from tests.fixtures.processes import free_port

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from baton.coordination.queue import AdmissionQueue
    from tests.fixtures.coordination import Stage

SLOT = key_slot(KEYS.all[0].encode())
NUM_SLOTS = 16384


@dataclass
class Node:
    """A server process."""

    process: Process
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Redis]:
        """A plain client of this node."""
        client = Redis(port=self.port, decode_responses=True, protocol=2)
        try:
            yield client
        finally:
            await client.aclose()

    async def ask(self, *words: object) -> Any:
        """One command and its reply."""
        async with self.client() as client:
            return await client.execute_command(*words)


@asynccontextmanager
async def node(folder: Path, *arguments: str) -> AsyncIterator[Node]:
    """A server on a free port, answering; `arguments` as on its command line."""
    port = free_port(and_above=10_000)  # there a cluster's nodes talk among each other
    folder.mkdir()
    command = [str(_find_binary()), *arguments, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    command = bound_to_this_process(command, signal.SIGKILL)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    started = Node(process, port)
    try:
        await until(lambda: started.ask("PING"))
        yield started
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until(ask: Callable[[], Any], holds: Callable[[Any], bool] = bool, *, within_s: float = 40.0) -> Any:
    """What `ask` gives when it does not fail any more and `holds`. Servers tell nobody of the changes among them."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                if holds(reply := await ask()):
                    return reply
            except (RedisError, OSError):
                pass
            await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[list[Node], Node, Node]]:
    """Three primaries that share the slots, a replica of the one that has ours, and that one."""
    options = ("--save", "", "--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(folder / str(index), *options)) for index in range(4)]
        *primaries, replica = nodes
        bounds = [NUM_SLOTS * index // 3 for index in range(4)]
        for primary, first, end in zip(primaries, bounds, bounds[1:], strict=False):
            await primary.ask("CLUSTER", "ADDSLOTS", *range(first, end))
        for other in nodes[1:]:
            await other.ask("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for each in nodes:
            await until(lambda each=each: each.ask("CLUSTER INFO"), lambda info: info["cluster_known_nodes"] == "4")
        owner = primaries[next(index for index in range(3) if bounds[index] <= SLOT < bounds[index + 1])]
        await replica.ask("CLUSTER", "REPLICATE", await owner.ask("CLUSTER MYID"))
        for each in nodes:
            await until(lambda each=each: each.ask("CLUSTER INFO"), lambda info: info["cluster_state"] == "ok")
        await until(lambda: replica.ask("INFO", "replication"), lambda info: info["master_link_status"] == "up")
        # Nobody is taken for dead who is held up for a second.
        for each in nodes:
            await each.ask("CONFIG", "SET", "cluster-node-timeout", 20_000)
        yield primaries, replica, owner


async def serve(queue: AdmissionQueue, name: str) -> None:
    """One request from admission to release."""
    async with asyncio.timeout(20), queue.admit(ticket(name)) as place:
        await place.granted()
        await place.release_prefill()


async def is_served(queue: AdmissionQueue, name: str) -> bool:
    try:
        await serve(queue, name)
    except UnavailableError:
        return False
    return True


@pytest.mark.timeout(120)
async def test_a_cluster_is_served_from_any_node_and_after_its_owner_died(tmp_path: Path):
    async with cluster(tmp_path) as (primaries, replica, owner):
        strangers = [each for each in primaries if each is not owner]
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in strangers)
        async with open_stage(url) as stage, stage.beating("p1", "d1"), stage.gateway("g1") as queue:
            await serve(queue, "before")
            assert await owner.ask("HLEN", KEYS.all[1]) == 2  # the workers are where the slot is
            async with queue.admit(ticket("running")) as place:
                await place.granted()
                for each in (*strangers, replica):
                    await each.ask("CONFIG", "SET", "cluster-node-timeout", 1000)
                owner.process.kill()
                # The replica takes over; what ran before holds its credit again, and new requests are served.
                await until(lambda: is_served(queue, "after"))
            await until(lambda: is_idle(stage, queue))


async def is_idle(stage: Stage, queue: AdmissionQueue) -> bool:
    try:
        await stage.assert_idle(queue)
    except (AssertionError, UnavailableError):  # so it is until the last lease of the time without Redis has ended
        return False
    return True


async def move_slot(source: Node, target: Node, others: list[Node], *, meanwhile: Callable[[], Any]) -> None:
    """Moves our slot and its keys as `redis-cli --cluster reshard` does; `meanwhile` runs before, between and after."""
    source_id, target_id = await source.ask("CLUSTER MYID"), await target.ask("CLUSTER MYID")
    await target.ask("CLUSTER", "SETSLOT", SLOT, "IMPORTING", source_id)
    await source.ask("CLUSTER", "SETSLOT", SLOT, "MIGRATING", target_id)
    keys = await source.ask("CLUSTER", "GETKEYSINSLOT", SLOT, 100)
    await meanwhile()
    for part in (keys[::2], keys[1::2]):
        await source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *part)
        await meanwhile()
    for each in (target, source, *others):
        await each.ask("CLUSTER", "SETSLOT", SLOT, "NODE", target_id)


@pytest.mark.timeout(120)
async def test_the_slot_moves_to_another_node_under_traffic(tmp_path: Path):
    async with cluster(tmp_path) as (primaries, _, owner), AsyncExitStack() as stack:
        target, third = (each for each in primaries if each is not owner)
        stage = await stack.enter_async_context(open_stage(f"redis+cluster://127.0.0.1:{third.port}"))
        await stack.enter_async_context(stage.beating("p1", "d1"))
        queues = [await stack.enter_async_context(stage.gateway(name, call_timeout_s=10.0)) for name in ("g1", "g2")]
        served = []

        async def traffic(number: int) -> None:
            for turn in count():
                if is_over.is_set():
                    return
                await serve(queues[number % 2], f"{number}-{turn}")
                served.append(number)

        async def some_served() -> None:
            wanted = len(served) + 10
            await stage.eventually(lambda: len(served) >= wanted)

        async def pause() -> None:
            tasks.create_task(long.release_prefill())
            await asyncio.sleep(0.1)

        # A worker that has left: now there can be keys of all kinds.
        await stage.workers("p9")
        await stage.registry.deregister("p9", "i1")
        # One long prompt at a time: the second waits until the first is done with its prefill worker.
        async with queues[0].admit(ticket("long", queue_class="long")) as long:
            await long.granted()
            async with queues[1].admit(ticket("next", queue_class="long")) as following:
                is_over = asyncio.Event()
                async with asyncio.TaskGroup() as tasks:
                    for number in range(4):
                        tasks.create_task(traffic(number))
                    await some_served()
                    await move_slot(owner, target, [third], meanwhile=pause)
                    await some_served()
                    is_over.set()
                assert await owner.ask("CLUSTER", "COUNTKEYSINSLOT", SLOT) == 0
                async with asyncio.timeout(20):
                    await following.granted()
                assert set(await target.ask("HKEYS", KEYS.all[8])) == {"a-long", "a-next"}
                assert [view.granted_seqs for view in await queues[0].workers()] == [2, 1]
                for queue in queues:
                    assert await queue.check_integrity() == []
        for queue in queues:
            await stage.assert_idle(queue)


@pytest.mark.timeout(120)
async def test_a_primary_that_a_sentinel_replaces(tmp_path: Path):
    async with AsyncExitStack() as stack:
        primary = await stack.enter_async_context(node(tmp_path / "primary", "--save", ""))
        replica = await stack.enter_async_context(
            node(tmp_path / "replica", "--save", "", "--replicaof", "127.0.0.1", str(primary.port))
        )
        await until(lambda: replica.ask("INFO", "replication"), lambda info: info["master_link_status"] == "up")
        rules = tmp_path / "sentinel.conf"
        rules.write_text(
            f"sentinel monitor queues 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds queues 1000\nsentinel failover-timeout queues 5000\n"
        )
        sentinel = await stack.enter_async_context(node(tmp_path / "sentinel", str(rules), "--sentinel"))
        await until(lambda: sentinel.ask("SENTINEL", "REPLICAS", "queues"))
        # The first of the named Sentinels is not there.
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/queues/0"
        stage = await stack.enter_async_context(open_stage(url))
        await stack.enter_async_context(stage.beating("p1", "d1"))
        queue = await stack.enter_async_context(stage.gateway("g1"))
        await serve(queue, "before")
        assert await primary.ask("HLEN", KEYS.all[1]) == 2
        primary.process.kill()
        await until(lambda: is_served(queue, "after"))
        assert await replica.ask("HLEN", KEYS.all[1]) == 2
        await until(lambda: is_idle(stage, queue))


@pytest.mark.parametrize("url", ["redis+cluster://127.0.0.1:1,127.0.0.1:2", "redis+sentinel://127.0.0.1:1/queues"])
async def test_nobody_to_ask_is_one_line(url: str):
    with pytest.raises(StartupError, match=r"redis\.url: cannot use Redis") as error:
        await connect(RedisSettings(url=url), KEYS)
    assert "\n" not in str(error.value)
