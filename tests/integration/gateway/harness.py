"""A gateway in this process, a real Redis, and workers that follow a script over the real protos."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.trace import NoOpTracerProvider
from redis.exceptions import RedisError

from baton.coordination.client import connect
from baton.coordination.commands import no_lost_cancel
from baton.coordination.keys import Keys
from baton.coordination.limits import ClassLimits, QueueConfig
from baton.coordination.queue import AdmissionQueue
from baton.coordination.registry import WorkerRegistry
from baton.core.clock import SystemClock
from baton.core.errors import FailedPreconditionError, UnavailableError
from baton.core.settings import RedisSettings, ServerSettings
from baton.core.workers import WorkerRecord, WorkerRole, WorkerState
from baton.rpc.channels import ChannelPool
from baton.rpc.server import ServingServer
from baton.telemetry.instruments import GatewayInstruments, new_registry
from baton.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    kv_transfer_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from gateway.attempts import Deployment as Workers
from gateway.classes import QueueClass, QueueClasses
from gateway.fleet import Fleet
from gateway.prefixes import KnownPrefixes
from gateway.routing import Router
from gateway.service import GatewayServicer, RequestSettings
from gateway.session import SessionServices
from gateway.tokenization import TokenizerPool
from gateway.worker_calls import LOOKAHEAD_BYTES, WorkerCalls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

    from baton.coordination.client import RedisConnection
    from gateway.served_model import ServedModel
    from gateway.tokenization import Tokenizer

CLASSES = {
    "chat": ClassLimits(max_waiting=8, max_waiting_tokens=4000),
    "long": ClassLimits(max_waiting=2, max_waiting_tokens=16_000),
}
BOUNDS = {"chat": 1023, "long": None}
SERVER = ServerSettings()


@dataclass
class Script:
    """What the workers answer. Each hook is an async generator of (request, context) that replaces the usual way."""

    answer: list[int] = field(default_factory=lambda: [100, 101, 102, 103])
    reason: int = common_pb2.FINISH_REASON_LENGTH
    prefill: Callable[..., AsyncIterator[Any]] | None = None
    decode: Callable[..., AsyncIterator[Any]] | None = None


class ScriptedPrefill(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.num_active = 0
        self.released: dict[str, asyncio.Event] = {}

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.released.setdefault(lease_of(request), asyncio.Event())
        self.num_active += 1
        try:
            async for response in (self.script.prefill or self.usual)(request, context):
                yield response
        finally:
            self.num_active -= 1

    async def usual(self, request: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        yield prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted())
        token_id = self.script.answer[request.num_output_tokens]
        if request.max_tokens == request.num_output_tokens + 1 or token_id in request.stop_token_ids:
            stopped = token_id in request.stop_token_ids
            reason = common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
            yield self.first_token(request, finish_reason=reason)
            yield prefill_pb2.PrefillResponse(released=prefill_pb2.PrefillReleased())
            return
        yield self.first_token(request, kv=self.descriptor(request))
        await self.released[lease_of(request)].wait()
        yield prefill_pb2.PrefillResponse(
            released=prefill_pb2.PrefillReleased(outcome=kv_transfer_pb2.LEASE_OUTCOME_CONSUMED)
        )

    def first_token(self, request: prefill_pb2.PrefillRequest, **fields: Any) -> prefill_pb2.PrefillResponse:
        token_id = self.script.answer[request.num_output_tokens]
        first = prefill_pb2.FirstToken(token_id=token_id, cached_tokens=2 + request.num_output_tokens, **fields)
        return prefill_pb2.PrefillResponse(first_token=first)

    def descriptor(self, request: prefill_pb2.PrefillRequest) -> kv_transfer_pb2.KvDescriptor:
        return kv_transfer_pb2.KvDescriptor(
            lease_id=lease_of(request),
            generation=7,
            worker_id="p1",
            num_tokens=len(request.token_ids),
            block_ids=[3, 1],
        )


class ScriptedDecode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, script: Script, prefill: ScriptedPrefill) -> None:
        self.script = script
        self.requests: list[decode_pb2.DecodeRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.num_active = 0
        self.ended_choices: set[tuple[str, int]] = set()
        self._prefill = prefill

    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.num_active += 1
        try:
            async for response in (self.script.decode or self.usual)(request, context):
                yield response
        finally:
            self.release(request)
            self.num_active -= 1

    async def usual(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[Any]:
        yield handover()
        self.release(request)
        position = request.kv.num_tokens + 1
        for token_id in self.script.answer[len(request.output_token_ids) + 1 : request.max_tokens]:
            yield tokens(position, token_id)
            position += 1
        yield finished(self.script.reason)

    async def EndChoice(self, request: decode_pb2.EndChoiceRequest, context: Any) -> decode_pb2.EndChoiceResponse:
        self.ended_choices.add((request.attempt_id, request.choice))
        return decode_pb2.EndChoiceResponse()

    def release(self, request: decode_pb2.DecodeRequest) -> None:
        self._prefill.released[request.kv.lease_id].set()


def lease_of(request: prefill_pb2.PrefillRequest) -> str:
    return f"lease-{request.attempt_id}"


def handover() -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(handover=decode_pb2.HandoverDone(transport="shm", num_bytes=1024))


def tokens(first_position: int, *ids: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodedTokens(first_position=first_position, ids=ids))


def finished(reason: int = common_pb2.FINISH_REASON_LENGTH) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(finished=decode_pb2.DecodeFinished(reason=reason, num_steps=1))


async def events_of(call: Any) -> list[gateway_pb2.GenerateResponse]:
    """The rest of a stream. Raises AioRpcError when it does not end well."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def text_of(events: list[gateway_pb2.GenerateResponse]) -> str:
    return "".join(event.delta.text for event in events)


def ids_of(events: list[gateway_pb2.GenerateResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.delta.token_ids]


class Deployment:
    """The running parts, and what a test asks of them."""

    def __init__(self, model: ServedModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.script = Script()
        self.prefill = ScriptedPrefill(self.script)
        self.decode = ScriptedDecode(self.script, self.prefill)
        self.queue: AdmissionQueue
        self.router: Router
        self.registry: WorkerRegistry
        self.connection: RedisConnection
        self.stub: gateway_pb2_grpc.GatewayServiceStub
        self.channel: grpc.aio.Channel
        self.address = ""
        self.metrics: CollectorRegistry
        self.pool: TokenizerPool
        self.records: list[WorkerRecord] = []
        self._beating = asyncio.Lock()
        self.prefill_server: ServingServer
        self.decode_server: ServingServer

    def record(self, role: WorkerRole, address: str, **changes: Any) -> WorkerRecord:
        dtype = changes.pop("dtype", "float32")
        fingerprint = self.model.fingerprint
        fields: dict[str, Any] = {
            "worker_id": "p1" if role is WorkerRole.PREFILL else "d1",
            "incarnation": "p-life1" if role is WorkerRole.PREFILL else "d-life1",
            "role": role,
            "state": WorkerState.READY,
            "address": address,
            "host_id": "host",
            "fingerprint": type(fingerprint)(
                model=fingerprint.model, weights=fingerprint.weights, tokenizer=fingerprint.tokenizer, dtype=dtype
            ),
            "block_size": 16,
            "num_blocks": 400,
            "max_num_seqs": 4,
            "max_context_tokens": self.model.max_context_tokens,
        }
        return WorkerRecord(**(fields | changes))

    async def beat(self) -> None:
        """One heartbeat of every worker, after which what an earlier call wrote is gone."""
        async with self._beating:
            for record in self.records:
                await self.registry.heartbeat(record)
            # They live until they are deregistered, even if this process, where they beat, is held up for seconds.
            in_an_hour_ms = (time.time() + 3600) * 1000
            beats = {record.worker_id: in_an_hour_ms for record in self.records}
            with no_lost_cancel():
                await self.connection.commands.zadd(Keys("test", self.model.name).all[2], beats, xx=True)

    async def announce(self) -> None:
        """One heartbeat of every worker; returns when the gateway has seen them."""
        await self.beat()
        seen = {record.worker_id for record in self.records}
        await eventually(lambda: {view.record.worker_id for view in self.queue.views} >= seen)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(name, labels) or 0.0

    async def assert_idle(self) -> None:
        """No call, no ticket, no credit is left."""
        await eventually(lambda: (self.prefill.num_active, self.decode.num_active, self.queue.num_live) == (0, 0, 0))
        await eventually(lambda: self.metric("baton_num_requests_running") == 0)
        for name in CLASSES:
            assert self.metric("baton_num_requests_waiting", queue_class=name) == 0
        await eventually(self.nothing_held)

    async def nothing_held(self) -> bool:
        held = [(view.granted_blocks, view.granted_seqs) for view in await self.queue.workers()]
        return await self.queue.check_integrity() == [] and all(credit == (0, 0) for credit in held)


async def eventually(holds: Callable[[], Any], *, within_s: float = 20.0) -> None:
    """Waits for the state of another process, which has no event to wait for."""
    async with asyncio.timeout(within_s):
        while True:
            result = holds()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Options:
    """What a test changes of the deployment."""

    queue_timeout_s: float = 15.0
    call_timeout_s: float = 10.0
    request_timeout_s: float = 20.0
    class_timeout_s: Mapping[str, float] = field(default_factory=dict)
    max_pending_texts: int = 16
    max_retries: int = 0
    shares_prefixes: bool = False
    tracer: Tracer = field(default_factory=lambda: NoOpTracerProvider().get_tracer("test"))


@asynccontextmanager
async def deployed(
    redis_url: str, model: ServedModel, tokenizer: Tokenizer, options: Options
) -> AsyncIterator[Deployment]:
    """A deployment with one worker of each role, registered; gone after the block."""
    parts = Deployment(model, tokenizer)
    async with AsyncExitStack() as stack:
        keys = Keys("test", model.name)
        connection = await connect(RedisSettings(url=redis_url, socket_timeout_s=options.call_timeout_s), keys)
        stack.push_async_callback(connection.close)
        parts.connection = connection
        parts.registry = WorkerRegistry(connection, keys)
        parts.registry._commands._timeout_s = options.call_timeout_s
        channels = ChannelPool(max_message_bytes=4 << 20, tracer=options.tracer, lookahead_bytes=LOOKAHEAD_BYTES)
        stack.push_async_callback(channels.close)
        parts.pool = TokenizerPool(tokenizer, num_threads=1, max_pending=options.max_pending_texts)
        stack.callback(parts.pool.close)
        parts.router = Router(model.fingerprint)
        config = QueueConfig(
            gateway_id="g1",
            classes=CLASSES,
            settle_s=0.0,
            tick_s=0.1,
            lease_s=2.0,
            call_timeout_s=options.call_timeout_s,
        )
        parts.queue = AdmissionQueue(connection, keys, parts.router.choose_route, config)
        parts.prefill_server = await start_worker(
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server, parts.prefill, prefill_pb2, options.tracer
        )
        stack.push_async_callback(parts.prefill_server.drain, 0.0)
        parts.decode_server = await start_worker(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server, parts.decode, decode_pb2, options.tracer
        )
        stack.push_async_callback(parts.decode_server.drain, 0.0)
        parts.records = [
            parts.record(WorkerRole.PREFILL, parts.prefill_server.address),
            parts.record(WorkerRole.DECODE, parts.decode_server.address),
        ]
        server = gateway_server(parts, channels, options)
        fleet = Fleet(parts.queue, parts.router, channels, server)
        tasks = await stack.enter_async_context(cancelled_at_exit())
        tasks.create_task(parts.queue.run())
        tasks.create_task(fleet.follow(interval_s=0.05, call_grace_s=1.0))
        tasks.create_task(keep_beating(parts))
        stack.push_async_callback(server.drain, 0.0)
        await server.start()
        parts.address = server.address
        parts.channel = grpc.aio.insecure_channel(parts.address)
        stack.push_async_callback(parts.channel.close)
        parts.stub = gateway_pb2_grpc.GatewayServiceStub(parts.channel)
        await eventually(lambda: parts.queue.is_available)
        await parts.announce()
        yield parts


def gateway_server(parts: Deployment, channels: ChannelPool, options: Options) -> ServingServer:
    parts.metrics = new_registry()
    services = SessionServices(
        model=parts.model,
        tokenizer=parts.pool,
        deployment=Workers(
            queue=parts.queue,
            router=parts.router,
            workers=WorkerCalls(channels),
            prefixes=KnownPrefixes(shares=options.shares_prefixes),
            max_retries=options.max_retries,
        ),
        tracer=options.tracer,
        classes=QueueClasses(
            QueueClass(
                name=name,
                max_prompt_tokens=BOUNDS[name],
                limits=limits,
                queue_timeout_s=options.queue_timeout_s,
                request_timeout_s=options.class_timeout_s.get(name),
            )
            for name, limits in CLASSES.items()
        ),
    )
    requests = RequestSettings(
        clock=SystemClock(),
        instruments=GatewayInstruments(parts.metrics),
        request_timeout_s=options.request_timeout_s,
        max_choices=3,
    )
    server = ServingServer(SERVER, options.tracer)
    server.add(
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server,
        GatewayServicer(services, requests),
        gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"],
    )
    return server


async def start_worker(add: Any, servicer: Any, module: Any, tracer: Tracer) -> ServingServer:
    server = ServingServer(SERVER, tracer)
    [service] = module.DESCRIPTOR.services_by_name.values()
    server.add(add, servicer, service)
    await server.start()
    return server


async def keep_beating(parts: Deployment) -> None:
    while True:
        # The next one tries again; a worker may be deregistered, or replaced, while its heartbeat is on the way.
        with suppress(UnavailableError, RedisError, FailedPreconditionError):
            await parts.beat()
        await asyncio.sleep(0.3)


@asynccontextmanager
async def cancelled_at_exit() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks run for ever."""
    async with asyncio.TaskGroup() as outer:
        started: list[asyncio.Task[Any]] = []

        class Recording:
            def create_task(self, work: Any) -> None:
                started.append(outer.create_task(work))

        try:
            yield Recording()
        finally:
            for task in started:
                task.cancel()
