"""Real workers as processes on a real Redis, with a small random model, and the calls that a gateway makes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.coordination.client import connect
from baton.coordination.keys import Keys
from baton.coordination.registry import WorkerRegistry
from baton.core.errors import UnavailableError
from baton.core.settings import RedisSettings
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from baton.core.workers import WorkerView
    from tests.fixtures.redis import PrivateRedis

MODEL = "tiny"
NAMESPACE = "workers-test"
# Short, for some tests wait for its end; long beside what a process on a busy machine may be kept from running.
LEASE_S = 3.0
# What hangs is given up after so long. Nothing takes that long, and no test is about how long it takes.
WITHIN_S = 120.0
# A window as small as that of a gateway: what the client's library takes in by itself is about 30 messages.
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
BLOCK_SIZE = 16
MAX_CONTEXT = 4096
VOCAB_SIZE = 211
GREEDY = common_pb2.SamplingParams(temperature=0.0)
_MODEL_FLAGS = ["--engine.dtype", "float32", "--engine.num_threads", "1", "--model.name", MODEL]
_START_S = 180.0


def save_tiny_model(folder: Path, **changes: Any) -> None:
    """A Llama of three small layers whose greedy choices are unambiguous."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    small: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.3,
    }
    LlamaForCausalLM(LlamaConfig(**small | changes)).eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


class WorkerProcess:
    """One worker, started as its users start it. `package` may have words behind it. `log` has what it wrote."""

    def __init__(self, package: str, worker_id: str, redis_url: str, model: Path, folder: Path) -> None:
        self.worker_id = worker_id
        self._command = [
            sys.executable,
            "-m",
            *package.split(),
            "--redis.url",
            redis_url,
            "--redis.namespace",
            NAMESPACE,
        ]
        self._command += ["--model.path", str(model), "--worker_id", worker_id, *_MODEL_FLAGS]
        self._log_path = folder / f"{worker_id}.log"
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen: list[int] = []

    def start(self, *flags: str) -> None:
        """Starts it; the last flag of a name wins."""
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen([*self._command, *flags], stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The one child that runs."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        (child,) = [int(pid) for pid in children]
        return child

    @property
    def segment(self) -> Path:
        """The shared memory that its engine has mapped."""
        maps = Path(f"/proc/{self.engine_pid}/maps").read_text()
        (path,) = set(re.findall(r"/dev/shm/baton-[0-9a-f]{32}", maps))
        return Path(path)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.thaw()  # an engine that is frozen would not notice
        self.wait()

    def freeze(self, *, server: bool = True) -> None:
        """Stalls the engine, and the server with it unless it is to go on. They stand still when this returns."""
        self._frozen = [self.engine_pid, *([self.pid] if server else [])]
        for pid in self._frozen:
            os.kill(pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + _START_S
        while not all(_stands_still(pid) for pid in self._frozen):
            assert time.monotonic() < deadline_s, "not stopped"
            time.sleep(0.001)

    def thaw(self) -> None:
        """Ends the stall."""
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    def terminate(self) -> None:
        assert self._process
        self._process.terminate()

    def wait(self, timeout_s: float = WITHIN_S) -> int:
        assert self._process
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """Ends it, whatever state it is in."""
        stop_all([self])


def stop_all(workers: Iterable[WorkerProcess]) -> None:
    """Ends them side by side, whatever state they are in."""
    running = [worker for worker in workers if worker.is_running]
    for worker in running:
        worker.thaw()
        worker.terminate()
    for worker in running:
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            worker.kill()


def _stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread has just ended, so they do not
        return False
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


class GatewayProcess:
    """A gateway, started as its users start it."""

    def __init__(self, redis_url: str, model: Path, folder: Path) -> None:
        self._command = [sys.executable, "-m", "gateway", "--redis.url", redis_url, "--redis.namespace", NAMESPACE]
        self._command += ["--model.path", str(model), "--model.name", MODEL, "--server.port", "0"]
        self._log_path = folder / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen([*self._command, *flags], stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def wait_address(self) -> str:
        """Where it listens; blocks until it does."""
        deadline_s = time.monotonic() + _START_S
        while not (found := re.search(r"address\S*[=:]\s*\S*?(127\.0\.0\.1:\d+)", self.log)):
            assert self._process, "not started"
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.05)
        return found[1]

    def stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)


@dataclass
class Pair:
    """A prefill and a decode worker that share a host."""

    prefill: WorkerProcess
    decode: WorkerProcess
    redis: PrivateRedis
    model: Path

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """Calls to both workers as they are in the registry now; waits for them to be there."""
        keys = Keys(NAMESPACE, MODEL)
        connection = await connect(RedisSettings(url=self.redis.url), keys)
        try:
            registry = WorkerRegistry(connection, keys)
            views = await _both_alive(registry, self)
            decode_address = views[self.decode.worker_id].record.address
            async with (
                grpc.aio.insecure_channel(views[self.prefill.worker_id].record.address) as to_prefill,
                grpc.aio.insecure_channel(decode_address) as to_decode,
                grpc.aio.insecure_channel(decode_address, options=SMALL_WINDOW) as slowly_to_decode,
            ):
                client = Client(registry, views, to_prefill, to_decode)
                client.slow_decode = decode_pb2_grpc.DecodeServiceStub(slowly_to_decode)
                yield client
        finally:
            await connection.close()


async def _both_alive(registry: WorkerRegistry, pair: Pair) -> dict[str, WorkerView]:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        views: dict[str, WorkerView] = {}
        with contextlib.suppress(UnavailableError):  # starting engines may take all cores from Redis for a second
            views = {view.record.worker_id: view for view in await registry.workers()}
        if {pair.prefill.worker_id, pair.decode.worker_id} <= views.keys():
            # A worker that was killed a moment ago is still listed.
            addresses = [view.record.address for view in views.values()]
            if all([await _answers(address) for address in addresses]):
                return views
        await asyncio.sleep(0.05)
    raise AssertionError(f"not ready:\n{pair.prefill.log}\n{pair.decode.log}")


async def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


@dataclass
class Answer:
    """What a whole request gave."""

    tokens: list[int] = field(default_factory=list)
    prefill_events: list[Any] = field(default_factory=list)
    decode_events: list[Any] = field(default_factory=list)

    @property
    def outcome(self) -> int:
        return self.prefill_events[-1].released.outcome


class Client:
    """The calls of a gateway, without its queue."""

    def __init__(
        self,
        registry: WorkerRegistry,
        views: dict[str, WorkerView],
        to_prefill: grpc.aio.Channel,
        to_decode: grpc.aio.Channel,
    ) -> None:
        self.registry = registry
        self.views = views
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(to_prefill)
        self.decode = decode_pb2_grpc.DecodeServiceStub(to_decode)
        # Calls of it go no further than they are read.
        self.slow_decode = self.decode
        self.channels = (to_prefill, to_decode)
        mine = next(iter(views.values())).record.fingerprint
        self.fingerprint = common_pb2.ModelFingerprint(model=mine.model, weights=mine.weights, tokenizer=mine.tokenizer)

    def prefill_request(self, attempt_id: str, token_ids: list[int], **changes: Any) -> prefill_pb2.PrefillRequest:
        fields = {"fingerprint": self.fingerprint, "sampling": GREEDY, "max_tokens": 8} | changes
        return prefill_pb2.PrefillRequest(attempt_id=attempt_id, token_ids=token_ids, **fields)

    def decode_request(self, attempt_id: str, first: prefill_pb2.FirstToken, **changes: Any) -> Any:
        fields = {
            "fingerprint": self.fingerprint,
            "sampling": GREEDY,
            "max_tokens": 8,
            "kv": first.kv,
            "first_token_id": first.token_id,
        } | changes
        return decode_pb2.DecodeRequest(attempt_id=attempt_id, **fields)

    async def first_token(self, call: Any) -> prefill_pb2.FirstToken:
        """Reads a Prefill call up to its first token."""
        while not (event := await call.read()).HasField("first_token"):
            assert event.WhichOneof("event") in ("started", "growing_cache")
        return event.first_token

    async def generate(self, attempt_id: str, token_ids: list[int], **changes: Any) -> Answer:
        """One request from prompt to last token; asserts the shape of both streams."""
        answer = Answer()
        shared = {name: value for name, value in changes.items() if name not in ("tenant", "priority")}
        call = self.prefill.Prefill(self.prefill_request(attempt_id, token_ids, **shared))
        async for event in call:
            if event.HasField("growing_cache"):  # this reader waits for the whole
                continue
            answer.prefill_events.append(event)
            if event.HasField("first_token"):
                answer.tokens.append(event.first_token.token_id)
                if event.first_token.HasField("kv"):
                    sampling = changes.get("sampling", GREEDY)
                    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0:
                        changes = changes | {"prompt_token_ids": token_ids}
                    changes = {name: value for name, value in changes.items() if name != "cache_salt"}
                    await self._decode_into(answer, attempt_id, event.first_token, changes)
        kinds = [event.WhichOneof("event") for event in answer.prefill_events]
        assert kinds == ["started", "first_token", "released"]
        return answer

    async def _decode_into(
        self, answer: Answer, attempt_id: str, first: prefill_pb2.FirstToken, changes: dict[str, Any]
    ) -> None:
        position = first.kv.num_tokens + 1
        async for event in self.decode.Decode(self.decode_request(attempt_id, first, **changes)):
            answer.decode_events.append(event)
            if event.HasField("tokens"):
                assert event.tokens.first_position == position
                position += len(event.tokens.ids)
                answer.tokens += event.tokens.ids
        kinds = [event.WhichOneof("event") for event in answer.decode_events]
        assert re.fullmatch("handover(,tokens)*,finished", ",".join(kinds))

    async def status(self) -> tuple[common_pb2.WorkerStatus, common_pb2.WorkerStatus]:
        prefill = await self.prefill.GetPrefillStatus(prefill_pb2.GetPrefillStatusRequest())
        decode = await self.decode.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest())
        return prefill.worker, decode.worker

    async def eventually(self, holds: Callable[[], Any], *, within_s: float = WITHIN_S) -> None:
        """Waits for what has no event to wait for: the state of another process."""
        deadline_s = time.monotonic() + within_s
        while not await holds():
            assert time.monotonic() < deadline_s, [str(status) for status in await self.status()]
            await asyncio.sleep(0.02)

    async def assert_all_free(self) -> None:
        """Both workers come to rest with no block in use."""

        async def idle() -> bool:
            statuses = await self.status()
            return all(s.num_used_blocks + s.num_running + s.num_waiting == 0 for s in statuses)

        await self.eventually(idle)
