"""Offered load at three times the capacity, from clients that retry as docs/operations.md tells them to."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.rpc.errors import from_call
from baton.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.integration.gateway.harness import CLASSES, finished, handover, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.gateway.harness import Deployment

WORK_S = 0.35
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
        self.queue_s: list[float] = []

    async def one(self, stub: gateway_pb2_grpc.GatewayServiceStub) -> None:
        try:
            response = await stub.Complete(REQUEST, timeout=20.0)
        except grpc.aio.AioRpcError as error:
            self.ends[f"{error.code().name}/{from_call(error).reason}"] += 1
        else:
            assert len(response.token_ids) == 4
            self.ends["tokens"] += 1
            self.queue_s.append(response.finished.timings.queue_s)


async def work(request: Any, context: Any) -> AsyncIterator[Any]:
    yield handover()
    await asyncio.sleep(WORK_S)  # the load itself: four slots that take so long each
    yield tokens(request.kv.num_tokens + 1, 101, 102, 103)
    yield finished()


def attempts(deployment: Deployment) -> float:
    [metric] = [metric for metric in deployment.metrics.collect() if metric.name == "baton_requests"]
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))


async def peak(stub: Any, seconds: float) -> float:
    """Requests a second while there is always one more than can run, and none is refused."""
    tally, ended_s = Tally(), []
    end_s = time.monotonic() + seconds

    async def caller() -> None:
        while time.monotonic() < end_s:
            await tally.one(stub)
            ended_s.append(time.monotonic())

    await asyncio.gather(*(caller() for _ in range(6)))
    assert set(tally.ends) == {"tokens"}
    busy = [at_s for at_s in ended_s if at_s <= end_s]  # later ones run beside empty slots
    return (len(busy) - 1) / (busy[-1] - busy[0])


async def test_three_times_the_capacity_costs_nothing_but_refusals(deployment: Deployment, record_property: Any):
    deployment.script.decode = work
    capacity = await peak(deployment.stub, 3.0)
    before = attempts(deployment)
    tally, offered, window_s = Tally(), 0, 8.0
    options = [("grpc.service_config", documented_service_config()), ("grpc.enable_retries", 1)]
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(deployment.address, options=options))
            for _ in range(NUM_CHANNELS)
        ]
        stubs = [gateway_pb2_grpc.GatewayServiceStub(channel) for channel in channels]
        start_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while (now_s := time.monotonic() - start_s) < window_s:
                while offered < 3 * capacity * now_s:
                    tasks.create_task(tally.one(stubs[offered % NUM_CHANNELS]))
                    offered += 1
                await asyncio.sleep(0.01)
        lasted_s = time.monotonic() - start_s
    goodput = tally.ends["tokens"] / lasted_s
    amplification = (attempts(deployment) - before) / offered
    measured = {
        "capacity_rps": round(capacity, 2),
        "offered_rps": round(offered / window_s, 2),
        "goodput_share": round(goodput / capacity, 3),
        "longest_queue_wait_s": round(max(tally.queue_s), 2),
        "amplification": round(amplification, 3),
        "ends": dict(tally.ends),
    }
    print(measured)
    for name, value in measured.items():
        record_property(name, str(value))
    # Nothing is lost: each request ended in tokens or in a refusal that says when to come back.
    assert tally.ends.total() == offered
    assert set(tally.ends) <= {"tokens", "RESOURCE_EXHAUSTED/QUEUE_FULL", "RESOURCE_EXHAUSTED/DEADLINE_UNMEETABLE"}
    assert tally.ends["tokens"] < offered / 2
    # Measured 0.95 to 1.03; others may take the processor from this test.
    assert goodput > 0.75 * capacity
    # As many as may wait, each for its turn at one of the slots.
    assert max(tally.queue_s) < 3 * (CLASSES["chat"].max_waiting + 1) / capacity
    # The budget: a tenth of the answered requests, and what it begins with.
    assert attempts(deployment) - before <= offered + 0.1 * tally.ends["tokens"] + 15
    await deployment.assert_idle()
