"""One pair of workers for all tests that do without other settings: each takes seconds to start."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.redis import PrivateRedis
from tests.integration.workers.harness import LEASE_S, Pair, WorkerProcess, save_tiny_model, stop_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ROLES = ("prefill", "decode")
NUM_SEATS = 8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder)
    return folder


@contextmanager
def new_pair(model: Path, folder: Path) -> Iterator[Pair]:
    """Two workers that nobody has started yet, on a Redis of their own; ended after the block."""
    with PrivateRedis() as redis:
        workers = [WorkerProcess(f"{role}_worker", f"{role[0]}1", redis.url, model, folder) for role in ROLES]
        try:
            yield Pair(*workers, redis, model)
        finally:
            stop_all(workers)


@pytest.fixture(scope="session")
def session_pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill worker with room for 8,192 positions and a decode worker with room for 2,720."""
    with new_pair(tiny_model, tmp_path_factory.mktemp("logs")) as pair:
        yield pair


@pytest.fixture
def pair(session_pair: Pair) -> Pair:
    """Both workers running: what the test before has killed is started again."""
    for worker in (session_pair.prefill, session_pair.decode):
        worker.thaw()
        if not worker.is_running:
            start(worker)
    return session_pair


def start(*workers: WorkerProcess) -> None:
    """Starts workers with the settings of these tests. A block is 6 KiB."""
    for worker in workers:
        if worker.worker_id.startswith("p"):
            worker.start("--engine.kv_cache_bytes", "3MiB", "--lease.lease_s", str(LEASE_S), "--stall_s", "3")
        else:
            worker.start("--engine.kv_cache_bytes", "1MiB", "--engine.max_num_seqs", str(NUM_SEATS), "--stall_s", "3")
