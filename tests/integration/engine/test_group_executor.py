"""A group of rank processes does what one process does, and its faults end as they should."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.errors import EngineFaultError, OutOfMemoryError, StartupError
from baton.engine.batch import BatchPlan, ScoredIds
from baton.engine.group_executor import GroupExecutor
from baton.engine.host_memory import SharedMemory
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.rank_hardware import HostRanks
from baton.engine.rank_process import GroupSpec
from baton.engine.torch_executor import TorchExecutor
from tests.integration.engine import families
from tests.integration.engine.group_children import LONG_STEP_TOKENS, run_short_of_memory
from tests.integration.engine.sequences import Sequence, generate, step

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("threads_as_before")

ROOT = Path(__file__).resolve().parents[3]
BLOCK_SIZE = 4
NUM_BLOCKS = 100
# Ranks of a busy machine may be late; one that is frozen is waited for in vain, so there it is short.
TIMEOUT_S, SHORT_TIMEOUT_S = 60.0, 2.0


def group_spec(folder: Path, memory: SharedMemory | None, size: int = 2, *, timeout_s: float = TIMEOUT_S) -> GroupSpec:
    return GroupSpec(
        size=size,
        folder=folder,
        layout=DecoderConfig.from_folder(folder).kv_layout(BLOCK_SIZE, "float32"),
        num_blocks=NUM_BLOCKS,
        hardware=HostRanks(),
        memory=memory,
        num_threads=1,
        timeout_s=timeout_s,
        set_up_log=run_short_of_memory,
    )


def start(folder: Path, size: int = 2, *, timeout_s: float = TIMEOUT_S) -> tuple[GroupExecutor, KVPool]:
    layout = group_spec(folder, None).layout
    memory = SharedMemory.create(NUM_BLOCKS * layout.block_bytes)
    pool = KVPool(layout, NUM_BLOCKS, storage=memory.map())
    try:
        return GroupExecutor.start(group_spec(folder, memory, size, timeout_s=timeout_s), pool), pool
    finally:
        memory.close()


def start_in_time(folder: Path, timeout_s: float) -> GroupExecutor:
    """A group that waits so long for its ranks. On a busy machine they may be later than that: then another one."""
    for _ in range(50):
        with contextlib.suppress(EngineFaultError):
            return start(folder, timeout_s=timeout_s)[0]
    raise AssertionError("no group connects")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    families.save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[tuple[GroupExecutor, KVPool]]:
    executor, pool = start(folder)
    yield executor, pool
    executor.close()
    executor.close()


def rank_pids() -> list[int]:
    """The ranks that this process has, by their command lines."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = []
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"\0rank-" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def scored(prompt: list[int]) -> BatchPlan:
    piece = replace(Sequence("a", prompt, list(range(12))).next_slice(100), top_logprobs=3)
    return BatchPlan(slices=[replace(piece, scored=ScoredIds(token_ids=prompt[1:], top=2))])


def test_it_gives_the_tokens_the_cache_and_the_logprobs_of_one_process(started, folder) -> None:
    executor, pool = started
    executor.warm_up()
    whole_pool = KVPool(pool.layout, NUM_BLOCKS)
    whole = TorchExecutor.from_folder(folder, pool=whole_pool)
    prompt, table = list(range(5, 24)), list(range(12))[::-1]
    tokens = generate(executor, Sequence("a", prompt, table), 12, chunks=(7, 2))
    assert tokens == families.reference_tokens(families.reference_model(folder), prompt, 12)
    assert generate(whole, Sequence("a", prompt, table), 12) == tokens
    for block in table[:7]:
        torch.testing.assert_close(pool.tensor[block], whole_pool.tensor[block], rtol=1e-4, atol=1e-4)
    ours, theirs = executor.execute(scored(prompt)), whole.execute(scored(prompt))
    assert ours.tokens == theirs.tokens
    assert ours.logprobs["a", 0].logprob == pytest.approx(theirs.logprobs["a", 0].logprob, abs=1e-4)
    for mine, other in zip(ours.prompt_logprobs["a"], theirs.prompt_logprobs["a"], strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_what_one_pool_holds_goes_on_in_another_whatever_the_number_of_ranks(started, folder) -> None:
    """The blocks' bytes are all that a handover copies."""
    group, group_pool = started
    pool = KVPool(group_pool.layout, NUM_BLOCKS)
    alone = TorchExecutor.from_folder(folder, pool=pool)
    prompt, table = list(range(30, 51)), list(range(12))
    expected = generate(alone, Sequence("a", prompt, list(range(20, 32))), 10)
    for first, first_pool, second, second_pool in ((group, group_pool, alone, pool), (alone, pool, group, group_pool)):
        sequence = Sequence("b", prompt, table)
        step(first, [(sequence, 100)])
        second_pool.tensor[40:52] = first_pool.tensor[:12]
        sequence.block_table = list(range(40, 52))
        assert generate(second, sequence, 10) == expected


def test_a_step_that_does_not_fit_into_a_ranks_memory_fails_alone(started) -> None:
    executor, _ = started
    (pid,) = rank_pids()
    long, short = Sequence("long", [7] * LONG_STEP_TOKENS, list(range(50))), Sequence("short", [1, 2, 3], [60])
    expected = executor.execute(BatchPlan(slices=[short.next_slice(9)])).tokens
    with pytest.raises(OutOfMemoryError, match="memory of a rank"):
        step(executor, [(long, LONG_STEP_TOKENS)])
    assert executor.execute(BatchPlan(slices=[short.next_slice(9)])).tokens == expected
    assert rank_pids() == [pid]


def test_a_step_that_fails_in_the_first_rank_fails_alone(started, monkeypatch) -> None:
    executor, _ = started
    piece = Sequence("short", [1, 2, 3], [60]).next_slice(9)
    expected = executor.execute(BatchPlan(slices=[piece])).tokens
    with monkeypatch.context() as patch:
        patch.setattr(executor._rank.executor.model, "_add_mlp", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.execute(BatchPlan(slices=[piece]))
    assert executor.execute(BatchPlan(slices=[piece])).tokens == expected


def test_a_killed_rank_is_the_end_and_is_named(folder) -> None:
    others = set(rank_pids())
    executor, _ = start(folder)
    (pid,) = set(rank_pids()) - others
    try:
        executor.check()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFaultError, match="rank 1 of 2 was killed by SIGKILL"):
            step(executor, [(Sequence("a", [1, 2, 3], [0]), 9)])
        with pytest.raises(EngineFaultError, match="rank 1 of 2 was killed by SIGKILL"):
            executor.check()
    finally:
        executor.close()


def test_a_frozen_rank_is_the_end_after_its_time_and_holds_nothing_up(folder) -> None:
    others = set(rank_pids())
    executor = start_in_time(folder, SHORT_TIMEOUT_S)
    (pid,) = set(rank_pids()) - others
    os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    with pytest.raises(EngineFaultError, match="rank 1 of 2 has not answered for 2 s"):
        step(executor, [(Sequence("a", [1, 2, 3], [0]), 9)])
    executor.close()
    assert not is_running(pid)
    assert time.monotonic() - started_s < TIMEOUT_S


def test_even_a_frozen_rank_ends_with_its_killed_parent(folder) -> None:
    command = [sys.executable, "-m", "tests.integration.engine.group_children", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    deadline_s = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_rank_that_cannot_start_says_why_in_one_line(folder, tmp_path) -> None:
    before = rank_pids()
    broken = replace(group_spec(folder, None), folder=tmp_path, memory=None)
    with pytest.raises(StartupError, match=r"config\.json"):
        GroupExecutor.start(broken)
    assert rank_pids() == before
