"""One pair of workers for a module: each takes seconds to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.coordination.embedded import EmbeddedRedis
from tests.integration.workers.harness import LEASE_S, Pair, WorkerProcess, save_tiny_model, segments

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker with room for 8,192 positions and a decode worker with room for 2,720."""
    before, folder = segments(), tmp_path_factory.mktemp("logs")
    with EmbeddedRedis() as redis:
        prefill = WorkerProcess("prefill_worker", "p1", redis.url, tiny_model, folder)
        decode = WorkerProcess("decode_worker", "d1", redis.url, tiny_model, folder)
        try:
            start(prefill, decode)
            yield Pair(prefill, decode, redis.url, tiny_model)
        finally:
            prefill.stop()
            decode.stop()
    assert segments() <= before


def start(*workers: WorkerProcess) -> None:
    """Starts workers with the settings of these tests. A block is 6 KiB."""
    for worker in workers:
        if worker.worker_id.startswith("p"):
            worker.start("--engine.kv_cache_bytes", "3MiB", "--lease.lease_s", str(LEASE_S), "--stall_s", "20")
        else:
            worker.start("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8", "--stall_s", "20")
