"""Ranks with a pool each and a host copy of them all, as on CUDA: here on a CPU, and in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from baton.core.errors import OutOfMemoryError
from baton.engine.batch import BatchPlan
from baton.engine.block_moves import Way
from baton.engine.group_executor import GroupExecutor
from baton.engine.host_copy import HostCopy, MirrorExecutor
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.rank_process import GroupSpec
from baton.engine.torch_executor import TorchExecutor
from tests.integration.engine import families
from tests.integration.engine.gloo_ranks import GlooRanks
from tests.integration.engine.group_children import LONG_STEP_TOKENS, UNLUCKY_BLOCK, run_short_of_memory
from tests.integration.engine.sequences import Sequence, generate, step
from tests.integration.workers.harness import save_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from baton.core.model import KVLayout

pytestmark = pytest.mark.usefixtures("threads_as_before")

BLOCK_SIZE = 4
NUM_BLOCKS = 100
NUM_SLOTS = 20
PROMPT = list(range(5, 26))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three KV heads, so that two ranks have unequal parts."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_model(folder, num_key_value_heads=3)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return families.reference_tokens(families.reference_model(folder), PROMPT, 12)


def layout_of(folder: Path) -> KVLayout:
    return DecoderConfig.from_folder(folder).kv_layout(BLOCK_SIZE, "float32")


def start(folder: Path) -> tuple[GroupExecutor, KVPool]:
    """A group of two, and the host copy of its pools, with some more blocks."""
    layout = layout_of(folder)
    host = KVPool.in_shared_memory(layout, NUM_BLOCKS + NUM_SLOTS)
    spec = GroupSpec(
        size=2,
        folder=folder,
        layout=layout,
        num_blocks=NUM_BLOCKS,
        hardware=GlooRanks(),
        memory=host.shared,
        num_host_blocks=host.num_blocks,
        num_threads=1,
        timeout_s=60.0,
        set_up_log=run_short_of_memory,
    )
    try:
        return GroupExecutor.start(spec, host), host
    finally:
        host.shared.close()


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[tuple[GroupExecutor, KVPool]]:
    """Of one head and of two."""
    started = start(folder)
    yield started
    started[0].close()


@pytest.fixture
def one(folder: Path) -> tuple[TorchExecutor, KVPool, HostCopy]:
    """A process with a host copy of its pool."""
    pool, host = KVPool(layout_of(folder), NUM_BLOCKS), KVPool(layout_of(folder), NUM_BLOCKS)
    return TorchExecutor.from_folder(folder, pool=pool), host, HostCopy(pool, host)


def test_the_host_copy_has_after_each_step_what_was_completed(two, one) -> None:
    group, host = two
    alone, whole, blocks = one
    table = [9, 3, 4, 5, 0, 1]
    divided, sequence = Sequence("a", PROMPT, table), Sequence("a", PROMPT, table)
    for num_tokens, completed in ((9, table[:2]), (12, table[2:])):
        host.tensor.zero_()
        whole.tensor.zero_()
        step(MirrorExecutor(group, group), [(divided, num_tokens)])
        step(MirrorExecutor(alone, blocks), [(sequence, num_tokens)])
        for tensor in (host.tensor, whole.tensor):
            assert [block for block in range(NUM_BLOCKS) if tensor[block].any()] == sorted(completed)
        torch.testing.assert_close(host.tensor[:NUM_BLOCKS], whole.tensor, rtol=1e-4, atol=1e-4)
    assert divided.tokens == sequence.tokens != []


def test_what_is_in_one_host_copy_goes_on_in_ranks_of_another_number(two, one, expected) -> None:
    (group, group_host), (alone, host, blocks) = two, one
    sides = ((group, group, group_host), (alone, blocks, host))
    for (source, source_blocks, source_host), (target, target_blocks, target_host) in (sides, sides[::-1]):
        sequence = Sequence("a", PROMPT, [9, 3, 4, 5, 0, 1])
        for num_tokens in (10, 100):
            step(MirrorExecutor(source, source_blocks), [(sequence, num_tokens)])
        target_host.tensor[30:36] = source_host.tensor[sequence.block_table]
        target_blocks.move(Way.BACK, range(30, 36), range(30, 36))
        sequence.block_table = list(range(30, 42))
        assert generate(target, sequence, 12) == expected


def test_blocks_leave_and_come_back_to_other_places_and_are_copied_within(two, expected) -> None:
    group, host = two
    sequence = Sequence("a", PROMPT, list(range(12)))
    assert generate(group, sequence, 5) == expected[:5]
    slots = [NUM_BLOCKS + slot for slot in (7, 3, 4, 5, 0, 1, 2)]
    group.move(Way.OUT, list(range(7)), slots)
    generate(group, Sequence("b", PROMPT[::-1], list(range(12))), 3)
    group.move(Way.BACK, slots, list(range(60, 67)))
    host.tensor[NUM_BLOCKS:] = 0
    group.move(Way.WITHIN, list(range(60, 67)), list(range(20, 27)))
    group.move(Way.WITHIN, [], [])
    sequence.block_table = list(range(20, 32))
    assert generate(group, sequence, 12) == expected


def test_a_copy_that_does_not_fit_into_a_ranks_memory_fails_alone(two, expected) -> None:
    group, _ = two
    with pytest.raises(OutOfMemoryError, match="a copy of KV blocks does not fit into memory"):
        group.move(Way.OUT, [1, UNLUCKY_BLOCK], [1, UNLUCKY_BLOCK])
    with pytest.raises(OutOfMemoryError, match="memory of a rank"):
        step(group, [(Sequence("long", [7] * LONG_STEP_TOKENS, list(range(50))), LONG_STEP_TOKENS)])
    mirroring = MirrorExecutor(group, group)
    unlucky = Sequence("unlucky", PROMPT[:3], [UNLUCKY_BLOCK]).next_slice(9)
    with pytest.raises(OutOfMemoryError, match="a copy of KV blocks does not fit into memory"):
        mirroring.execute(BatchPlan(slices=[unlucky]))
    assert generate(mirroring, Sequence("a", PROMPT, list(range(12))), 12) == expected
