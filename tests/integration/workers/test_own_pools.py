"""Workers whose ranks have a pool each hand over by way of host copies, between different numbers of ranks.

What they do on CUDA, with a CPU in each device's place and Gloo in NCCL's: see `own_pools`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from baton.coordination.embedded import EmbeddedRedis
from tests.fixtures.processes import descendants
from tests.integration.engine import families
from tests.integration.workers import test_choices
from tests.integration.workers.harness import GREEDY, VOCAB_SIZE, Pair, WorkerProcess, save_tiny_model, stop_all
from tests.integration.workers.test_deaths import ends, start_decode
from tests.integration.workers.test_growing import CHUNK, MAX_TOKENS, PROMPT, finish, growing_cache, open_decode
from tests.integration.workers.test_preemption import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integration.workers.harness import Client

MODULE = "tests.integration.workers.own_pools"
# Of one chunk, with an incomplete block at the end; the second one has the first one's beginning.
SHORT = [[(7 * i + i * i + 3) % VOCAB_SIZE for i in range(length)] for length in (40, 55)]
# The decode worker's pool has 464 positions: three of these fit.
CROWD = [[3 + index, 1, 4, 1, 5] for index in range(6)]
NUM_CROWD_TOKENS = 110
SMALL = ("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three KV heads: two ranks have unequal parts. A block is 36 KiB."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, num_key_value_heads=3, head_dim=32)
    return folder


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker of two ranks and small steps; its reader is started by the tests."""
    folder = tmp_path_factory.mktemp("logs")
    with EmbeddedRedis() as redis:
        prefill, decode = (
            WorkerProcess(f"{MODULE} {role}_worker", role, redis.url, model, folder) for role in ("prefill", "decode")
        )
        try:
            prefill.start(
                *("--engine.kv_cache_bytes", "4MiB", "--engine.tensor_parallel_size", "2"),
                *("--handover.transports", "shm,gloo,grpc", "--engine.max_num_batched_tokens", str(CHUNK)),
            )
            yield Pair(prefill, decode, redis, model)
        finally:
            stop_all([prefill, decode])


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return families.reference_model(model)


async def start_decode_worker(pair: Pair, *flags: str) -> None:
    """Ends the one that runs."""
    if pair.decode.is_running:
        pair.decode.terminate()
        assert await asyncio.to_thread(pair.decode.wait) == 0
    pair.decode.start(*SMALL, *flags)


async def check_handovers(client: Client, reference: Any, way: str) -> None:
    """Caches that grow and caches that came whole, blocks found in the prefix cache among them."""
    request = client.prefill_request(f"{way}-growing", PROMPT, max_tokens=MAX_TOKENS, cache_salt=way)
    prefill = client.prefill.Prefill(request)
    decode = open_decode(client, f"{way}-growing", await growing_cache(prefill))
    tokens, handover = await finish(client, prefill, decode, len(PROMPT))
    assert tokens == families.reference_tokens(reference, PROMPT, MAX_TOKENS)
    assert handover.transport == way
    for index, prompt in enumerate([*SHORT, PROMPT]):
        answer = await client.generate(f"{way}-{index}", prompt, max_tokens=MAX_TOKENS)
        assert answer.tokens == families.reference_tokens(reference, prompt, MAX_TOKENS)
        assert answer.decode_events[0].handover.transport == way
    await client.assert_all_free()


@pytest.mark.parametrize("way", ["gloo", "grpc"])
async def test_pools_in_parts_are_read_over_the_network_into_one(pair: Pair, reference: Any, way: str) -> None:
    await start_decode_worker(pair, "--handover.transports", way)
    async with pair.client() as client:
        await check_handovers(client, reference, way)


async def test_pools_in_parts_are_read_into_other_parts_through_shared_memory(pair: Pair, reference: Any) -> None:
    """What then goes on in the parts: swaps, copies within, a cancelled call; and a rank's death on each side."""
    await start_decode_worker(pair, "--engine.tensor_parallel_size", "3", "--telemetry.metrics_port", "0")
    async with pair.client() as client:
        await check_handovers(client, reference, "shm")
        await check_swaps(pair, client, reference)
        # Outputs of one prompt share its blocks, but the last one, which is copied within the pools.
        several = await test_choices.Choices(client, "several", sampling=GREEDY).run()
        expected = families.reference_tokens(reference, test_choices.PROMPT, test_choices.MAX_TOKENS)
        assert several == dict.fromkeys(range(3), expected)
        _, decode = await start_decode(client, "cancelled", max_tokens=380)
        decode.cancel()
        await client.assert_all_free()
        ranks = [pid for pid, command in descendants(pair.decode.pid).items() if " rank-" in command]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert await asyncio.to_thread(pair.decode.wait) == 1
        assert re.search(r"the worker ends: .*rank \d of 3 was killed by SIGKILL", pair.decode.log)
        await ends(ranks[0])
        segment = pair.prefill.segment
        (rank,) = [pid for pid, command in descendants(pair.prefill.pid).items() if " rank-" in command]
        os.kill(rank, signal.SIGKILL)
        assert await asyncio.to_thread(pair.prefill.wait) == 1
        assert not segment.exists()


async def check_swaps(pair: Pair, client: Client, reference: Any) -> None:
    """More than the blocks hold; that they meet is not certain the first time."""
    prompts = torch.tensor(CROWD)
    with torch.inference_mode():
        output = reference.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_CROWD_TOKENS, do_sample=False
        )
    expected = output[:, prompts.shape[1] :].tolist()
    for turn in range(20):
        answers = await asyncio.gather(
            *(
                client.generate(f"crowd-{turn}-{index}", prompt, max_tokens=NUM_CROWD_TOKENS)
                for index, prompt in enumerate(CROWD)
            )
        )
        assert [answer.tokens for answer in answers] == expected
        seen = metrics(pair, client)
        if seen.get('baton_preemptions_total{how="swap"}', 0) > 0:
            break
    else:
        raise AssertionError("nobody had to give way")
    await client.assert_all_free()
    seen = metrics(pair, client)
    assert seen['baton_swapped_blocks_total{way="out"}'] == seen['baton_swapped_blocks_total{way="in"}'] > 0
