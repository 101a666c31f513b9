"""Whole workers on devices: a prefill worker hands over to a decode worker, directly or through host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.coordination.embedded import EmbeddedRedis
from tests.integration.engine import families
from tests.integration.workers.harness import VOCAB_SIZE, Pair, WorkerProcess, save_tiny_model, stop_all

if TYPE_CHECKING:
    from pathlib import Path

# Kernels may have to be compiled first.
pytestmark = [pytest.mark.timeout(900)]

CHUNK, MAX_TOKENS = 64, 12
PROMPTS = [[(7 * i + i * i + k) % VOCAB_SIZE for i in range(length)] for k, length in ((0, 309), (3, 40))]


async def check(folder: Path, way: str, *, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> None:
    """The tokens of the reference, by this way, and all blocks free in the end."""
    model = folder / "model"
    save_tiny_model(model)
    reference = families.reference_model(model)
    shared = ("--engine.device", "cuda", "--engine.kv_cache_bytes", "4MiB", "--handover.transports", way)
    with EmbeddedRedis() as redis:
        workers = [WorkerProcess(f"{role}_worker", role, redis.url, model, folder) for role in ("prefill", "decode")]
        try:
            workers[0].start(*shared, "--engine.max_num_batched_tokens", str(CHUNK), *prefill)
            workers[1].start(*shared, *decode)
            async with Pair(workers[0], workers[1], redis, model).client() as client:
                for turn in ("first", "known"):
                    for index, prompt in enumerate(PROMPTS):
                        answer = await client.generate(f"{turn}-{index}", prompt, max_tokens=MAX_TOKENS)
                        assert answer.tokens == families.reference_tokens(reference, prompt, MAX_TOKENS)
                        assert answer.decode_events[0].handover.transport == way
                await client.assert_all_free()
        finally:
            stop_all(workers)


@pytest.mark.gpu(num_devices=1)
@pytest.mark.parametrize("way", ["grpc", "shm", "gloo"])
async def test_a_host_copy_is_read_by_workers_on_one_device(tmp_path: Path, way: str) -> None:
    await check(tmp_path, way, prefill=("--handover.host_copy",))


@pytest.mark.gpu(num_devices=1)
async def test_without_a_host_copy_memory_is_mapped(tmp_path: Path) -> None:
    await check(tmp_path, "cuda_ipc")


@pytest.mark.gpu(num_devices=2)
@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 1), (1, 2), (2, 2)])
async def test_ranks_on_two_devices_hand_over(tmp_path: Path, prefill_ranks: int, decode_ranks: int) -> None:
    await check(
        tmp_path,
        "shm",
        prefill=("--handover.host_copy", "--engine.tensor_parallel_size", str(prefill_ranks)),
        decode=("--engine.tensor_parallel_size", str(decode_ranks)),
    )
