"""One pair of workers for a module: each takes seconds to start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fixtures.redis import PrivateRedis
from tests.integration.workers.harness import LEASE_S, Pair, WorkerProcess, save_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def module_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker with room for 8,192 positions and a decode worker with room for 2,720."""
    folder = tmp_path_factory.mktemp("logs")
    with PrivateRedis() as redis:
        prefill = WorkerProcess("prefill_worker", "p1", redis.url, tiny_model, folder)
        decode = WorkerProcess("decode_worker", "d1", redis.url, tiny_model, folder)
        try:
            yield Pair(prefill, decode, redis, tiny_model)
        finally:
            prefill.stop()
            decode.stop()


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    """Both workers running: what the test before has killed is started again."""
    for worker in (module_pair.prefill, module_pair.decode):
        if not worker.is_running:
            start(worker)
    return module_pair


def start(*workers: WorkerProcess) -> None:
    """Starts workers with the settings of these tests. A block is 6 KiB."""
    for worker in workers:
        if worker.worker_id.startswith("p"):
            worker.start("--engine.kv_cache_bytes", "3MiB", "--lease.lease_s", str(LEASE_S), "--stall_s", "3")
        else:
            worker.start("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", "8", "--stall_s", "3")
