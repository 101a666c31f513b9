"""More sequences than the decode worker's blocks hold: they give way to each other and lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import torch

from baton.core.clock import SystemClock
from baton.core.errors import ServingError
from baton.core.generation import SamplingParams, StopRule
from baton.engine.batch import BatchPlan, SequenceSlice
from baton.engine.block_pool import BlockPool
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.torch_executor import TorchExecutor
from baton.worker.engine_loop import EngineLoop
from decode_worker.engine_core import DecodeCore
from decode_worker.messages import Accept, Token
from decode_worker.movers import CopyDone, Rooms
from decode_worker.swapper import ThreadSwapper
from kv_transfer.descriptor import KVDescriptor
from kv_transfer.swap import SwapSpace
from kv_transfer.transport import ReadResult
from tests.integration.workers.conftest import new_pair, start
from tests.integration.workers.test_slow_reader import is_parked, unread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.integration.workers.harness import Client, Pair

PROMPTS = {f"a{index}": [3 + index, 1, 4, 1, 5] for index in range(6)}
# The pool has 2,720 positions: three of them fit, six do not.
NUM_TOKENS = 700
# Six that are sent at once are there at once, unless something keeps the senders from running: then it is tried again.
MAX_TRIES = 20
LIMITS = ("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8")


async def run_at_once(
    client: Client, run: str, names: list[str], *, preferred: Sequence[str] = ()
) -> dict[str, list[int] | BaseException]:
    """The tokens of requests that are sent at once, or how they failed."""
    answers = await asyncio.gather(
        *(
            client.generate(f"{run}-{name}", PROMPTS[name], max_tokens=NUM_TOKENS, priority=int(name in preferred))
            for name in names
        ),
        return_exceptions=True,
    )
    return {
        name: answer if isinstance(answer, BaseException) else answer.tokens
        for name, answer in zip(names, answers, strict=True)
    }


def listening_ports(pid: int) -> set[int]:
    """The TCP ports on which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(str(descriptor.readlink()))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    is_listening = "0A"
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == is_listening and f"socket:[{row[9]}]" in sockets
    }


def metrics(pair: Pair, client: Client) -> dict[str, float]:
    """What the decode worker counts; it has two ports."""
    address = client.views[pair.decode.worker_id].record.address
    [port] = listening_ports(pair.decode.pid) - {int(address.rpartition(":")[2])}
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


@pytest.fixture(scope="module")
def crowded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both workers running."""
    with new_pair(tiny_model, tmp_path_factory.mktemp("logs")) as pair:
        start(pair.prefill)
        pair.decode.start(*LIMITS, "--telemetry.metrics_port", "0")
        yield pair


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    """The tokens of each prompt, once they were generated."""
    return {}


async def learn(client: Client, known: dict[str, list[int]]) -> None:
    """Generates what is not known with as many sequences at a time as have room."""
    names = [name for name in PROMPTS if name not in known]
    for some in (names[:3], names[3:]):
        known |= await run_at_once(client, "few", some)


async def test_sequences_that_gave_way_end_with_the_tokens_they_have_alone(crowded, known):
    async with crowded.client() as client:
        await learn(client, known)
        assert metrics(crowded, client).get('baton_preemptions_total{how="swap"}', 0) == 0
        for number in range(MAX_TRIES):
            assert await run_at_once(client, f"crowd-{number}", list(PROMPTS)) == known
            seen = metrics(crowded, client)
            if seen.get('baton_preemptions_total{how="swap"}'):  # else some had ended before others began
                break
        assert seen['baton_preemptions_total{how="swap"}'] >= 1
        assert seen['baton_preemptions_total{how="shed"}'] == 0
        assert seen['baton_swapped_blocks_total{way="out"}'] == seen['baton_swapped_blocks_total{way="in"}'] > 0
        await client.assert_all_free()


async def test_a_slow_reader_gives_way_to_those_who_read_and_loses_nothing(crowded):
    async with crowded.client() as client:
        slow = (await client.generate("slow-alone", [3, 1, 4, 1, 5], max_tokens=1500)).tokens
        async with unread(client, "slow") as call:
            await client.eventually(lambda: is_parked(client))
            others = await asyncio.gather(
                *(client.generate(f"quick-{index}", [3 + index, 1, 4, 1, 5], max_tokens=1300) for index in range(2))
            )
            assert others[0].tokens == slow[:1300]
            tokens = []
            async for event in call:
                tokens += event.tokens.ids
        assert tokens == slow[1:]
        await client.assert_all_free()


async def test_without_swap_space_some_are_refused_and_the_others_go_on(crowded, known):
    crowded.decode.stop()
    crowded.decode.start(*LIMITS, "--swap_bytes", "0")
    async with crowded.client() as client:
        await learn(client, known)
        for number in range(MAX_TRIES):
            crowd = await run_at_once(client, f"shed-{number}", list(PROMPTS), preferred=["a4", "a5"])
            shed = [name for name in PROMPTS if isinstance(crowd[name], BaseException)]
            if shed:
                break
        assert 1 <= len(shed) <= 3
        assert not {"a4", "a5"} & set(shed)
        for name in shed:
            failure = crowd.pop(name)
            assert isinstance(failure, grpc.aio.AioRpcError)
            assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "swap space" in failure.details()
        assert crowd == {name: known[name] for name in crowd}
        await client.assert_all_free()


class Prefilling:
    """A copier that computes what a prefill worker would hand over."""

    def __init__(self, executor: TorchExecutor, prompts: dict[str, list[int]]) -> None:
        self._executor = executor
        self._prompts = prompts
        self._done: list[CopyDone] = []

    def start(self, attempt_id, kv, block_ids):
        self.first_token(attempt_id, list(block_ids))
        self._done.append(CopyDone(attempt_id=attempt_id, result=ReadResult(transport="shm", num_bytes=1, copy_s=0.0)))

    def first_token(self, attempt_id: str, block_ids: list[int]) -> int:
        piece = SequenceSlice(
            attempt_id=attempt_id,
            token_ids=self._prompts[attempt_id],
            start_position=0,
            block_table=block_ids,
            sampling=SamplingParams(temperature=0.0),
        )
        (token,) = self._executor.execute(BatchPlan(slices=[piece])).tokens
        assert token is not None
        return token

    @property
    def has_done(self):
        return bool(self._done)

    def take_done(self):
        done, self._done = self._done, []
        return done


def generate(
    executor: TorchExecutor, pool: KVPool, num_blocks: int, prompts: dict[str, list[int]], num_choices: int = 1
) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Tokens of each choice with so many of the pool's blocks, and how often somebody gave way."""
    layout = pool.layout
    copier = Prefilling(executor, prompts)
    firsts = {name: copier.first_token(name, [0, 1, 2]) for name in prompts}
    woken = threading.Event()
    swapper = ThreadSwapper(SwapSpace(pool, 64), woken.set)
    rooms = Rooms(pool=BlockPool(num_blocks, 16), copy_blocks=pool.copy_blocks, swap=BlockPool(64, 16), swapper=swapper)
    core = DecodeCore(rooms, 8, copier, SystemClock())
    loop = EngineLoop(core, executor, SystemClock())
    commands = [
        Accept(
            attempt_id=name,
            kv=KVDescriptor(
                lease_id=name,
                lease_slot=0,
                generation=1,
                worker_id="p",
                incarnation="i",
                address="127.0.0.1:1",
                block_ids=tuple(range(layout.blocks_for(len(prompt)))),
                num_tokens=len(prompt),
                lease_s=5.0,
            ),
            first_token_ids=(firsts[name],) * num_choices,
            num_choices=num_choices,
            source_block_size=layout.block_size,
            sampling=SamplingParams(temperature=0.0 if num_choices == 1 else 0.8, seed=3),
            stop=StopRule(max_tokens=30, stop_token_ids=frozenset()),
        )
        for name, prompt in prompts.items()
    ]
    batches = []
    loop.turn(commands, list, batches.append)
    while not core.stats.is_idle:
        loop.turn([], list, batches.append)
    swapper.close()
    tokens: dict[tuple[str, int], list[int]] = {(name, choice): [] for name in prompts for choice in range(num_choices)}
    for event in (event for batch in batches for event in batch.events):
        assert not isinstance(getattr(event, "error", None), ServingError)
        if isinstance(event, Token):
            tokens[event.attempt_id, event.choice].append(event.token_id)
    return tokens, core.stats.preemptions.num_swapped


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two that compute one step wait for each other for long where other processes compute too."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("one_thread")
def test_the_real_model_says_the_same_with_few_blocks_as_with_many(model_folder):
    prompts = {f"a{index}": list(range(100 * index + 5, 100 * index + 16 + index)) for index in range(4)}
    layout = DecoderConfig.from_folder(model_folder).kv_layout(16, "bfloat16")
    pool = KVPool(layout, 32)
    executor = TorchExecutor.from_folder(model_folder, pool=pool)
    plenty, never = generate(executor, pool, 32, prompts)
    starved, often = generate(executor, pool, 6, prompts)
    assert starved == plenty
    assert all(len(each) == 29 for each in plenty.values())
    assert (never, often >= 1) == (0, True)
    # With three outputs of each prompt, two of these fit: each has its prompt's one or two blocks and six of its own.
    plenty, never = generate(executor, pool, 32, prompts, num_choices=3)
    starved, often = generate(executor, pool, 11, prompts, num_choices=3)
    assert starved == plenty
    assert all(len(each) == 29 for each in plenty.values())
    assert len({tuple(each) for each in plenty.values()}) == len(plenty)
    assert (never, often >= 1) == (0, True)
