"""Offered load at three times the capacity, from clients that retry as docs/operations.md tells them to."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.integration.gateway.harness import CLASSES, finished, handover, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.harness import Deployment

WORK_S = 0.7
NUM_SLOTS = 4
NUM_SERVED = 40
REQUEST = gateway_pb2.GenerateRequest(
    token_ids=common_pb2.TokenIds(ids=[5, 6, 7]), stop=common_pb2.StopConditions(max_tokens=4)
)
# Each client process has a budget of its own; here all channels are in one process, so they share one.
NUM_CHANNELS = 4


def documented_service_config() -> str:
    """The client configuration that the documentation shows, as clients would copy it."""
    text = Path("docs/operations.md").read_text(encoding="utf-8")
    block = text.split("```json\n", 1)[1].split("```", 1)[0]
    return json.dumps(json.loads(block))


class Tally:
    """How requests ended."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.positions: list[int] = []
        self.queue_s: list[float] = []

    async def one(self, stub: gateway_pb2_grpc.GatewayServiceStub) -> None:
        try:
            response = await stub.Complete(REQUEST, timeout=60.0)
        except grpc.aio.AioRpcError as error:
            self.ends[f"{error.code().name}/{from_call(error).reason}"] += 1
        else:
            assert len(response.token_ids) == 4
            self.ends["tokens"] += 1
            self.positions.append(response.accepted.queue_position)
            self.queue_s.append(response.finished.timings.queue_s)


class Load:
    """The slots' work, and how much of their time they had some."""

    def __init__(self) -> None:
        self.num_served = 0
        self.busy_s = 0.0

    async def work(self, request: Any, context: Any) -> AsyncIterator[Any]:
        start_s = time.monotonic()
        yield handover()
        await asyncio.sleep(WORK_S)  # the load itself: a slot that takes so long
        yield tokens(request.kv.num_tokens + 1, 101, 102, 103)
        yield finished()
        self.num_served += 1
        self.busy_s += time.monotonic() - start_s


def attempts(deployment: Deployment) -> float:
    [metric] = [metric for metric in deployment.metrics.collect() if metric.name == "baton_requests"]
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


async def test_three_times_the_capacity_costs_nothing_but_refusals(deployment: Deployment, record_property: Any):
    load, tally, offered = Load(), Tally(), 0
    deployment.script.decode = load.work
    places = NUM_SLOTS + CLASSES["chat"].max_waiting
    options = [("grpc.service_config", documented_service_config()), ("grpc.enable_retries", 1)]
    async with grpc.aio.insecure_channel(deployment.address, options=options) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while load.num_served < NUM_SERVED:
                # Three new ones for each that was served, whatever the machine lets the workers do now.
                while offered < places + 3 * load.num_served:
                    tasks.create_task(tally.one(stub))
                    offered += 1
                await asyncio.sleep(0.01)
            lasted_s, busy_s = time.monotonic() - start_s, load.busy_s
    measured = {
        "offered": offered,
        "served_rps": round(load.num_served / lasted_s, 2),
        "busy_share": round(busy_s / (NUM_SLOTS * lasted_s), 3),
        "longest_queue_wait_s": round(max(tally.queue_s), 2),
        "amplification": round(attempts(deployment) / offered, 3),
        "ends": dict(tally.ends),
    }
    print(measured)
    for name, value in measured.items():
        record_property(name, str(value))
    # Nothing is lost: each request ended in tokens or in a refusal that says when to come back.
    assert tally.ends.total() == offered
    assert set(tally.ends) <= {"tokens", "RESOURCE_EXHAUSTED/QUEUE_FULL", "RESOURCE_EXHAUSTED/DEADLINE_UNMEETABLE"}
    assert tally.ends["tokens"] < offered / 2
    # The slots have work all the time but for what lies between two requests: 0.97 here when nobody else takes the
    # processor, which is the price of a request and no more with all the refusals beside it.
    assert busy_s > 0.5 * NUM_SLOTS * lasted_s
    # Nobody waits behind more than may wait.
    assert max(tally.positions) < CLASSES["chat"].max_waiting
    # The budget: a tenth of the answered requests, and what it begins with.
    assert attempts(deployment) <= offered + 0.1 * tally.ends["tokens"] + 15
    await deployment.assert_idle()
