"""Ranks on two devices generate what one device does, and their caches go on elsewhere by way of the host copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.engine.block_moves import Way
from baton.engine.group_executor import GroupExecutor
from baton.engine.host_copy import HostCopy, MirrorExecutor
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.rank_hardware import CudaRanks
from baton.engine.rank_process import GroupSpec
from baton.engine.torch_executor import TorchExecutor
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence, generate, step

if TYPE_CHECKING:
    from pathlib import Path

NUM_BLOCKS = 40


@pytest.mark.gpu(num_devices=2)
def test_two_devices_generate_what_one_does(tmp_path: Path) -> None:
    families.save_model("llama", tmp_path)
    layout = DecoderConfig.from_folder(tmp_path).kv_layout(4, "float32")
    alone = TorchExecutor.from_folder(tmp_path, pool=KVPool(layout, NUM_BLOCKS, device="cuda:0"))
    prompt = list(range(5, 24))
    expected = generate(alone, Sequence("a", prompt, list(range(12))), 12)
    spec = GroupSpec(
        size=2,
        folder=tmp_path,
        layout=layout,
        num_blocks=NUM_BLOCKS,
        hardware=CudaRanks(),
        memory=None,
        num_threads=1,
        timeout_s=60.0,
    )
    group = GroupExecutor.start(spec)
    try:
        assert generate(group, Sequence("a", prompt, list(range(12))), 12, chunks=(7, 2)) == expected
    finally:
        group.close()


@pytest.mark.gpu(num_devices=2)
@pytest.mark.parametrize("from_ranks", [True, False])
def test_a_cache_goes_between_two_devices_and_one_through_host_copies(tmp_path: Path, from_ranks: bool) -> None:
    families.save_model("llama", tmp_path)
    layout = DecoderConfig.from_folder(tmp_path).kv_layout(4, "float32")
    pool, host = KVPool(layout, NUM_BLOCKS, device="cuda:0"), KVPool(layout, NUM_BLOCKS)
    alone, blocks = TorchExecutor.from_folder(tmp_path, pool=pool), HostCopy(pool, host)
    prompt, table = list(range(5, 26)), [9, 3, 4, 5, 0, 1]
    expected = generate(alone, Sequence("a", prompt, list(range(12))), 12)
    shared = KVPool.in_shared_memory(layout, NUM_BLOCKS)
    assert shared.shared is not None
    spec = GroupSpec(
        size=2,
        folder=tmp_path,
        layout=layout,
        num_blocks=NUM_BLOCKS,
        hardware=CudaRanks(),
        memory=shared.shared,
        num_host_blocks=NUM_BLOCKS,
        num_threads=1,
        timeout_s=60.0,
    )
    group = GroupExecutor.start(spec, shared)
    try:
        sides = [(alone, blocks, host), (group, group, shared)]
        (source, source_blocks, source_host), (target, target_blocks, target_host) = (
            sides[::-1] if from_ranks else sides
        )
        sequence = Sequence("a", prompt, table)
        for num_tokens in (10, 100):
            step(MirrorExecutor(source, source_blocks), [(sequence, num_tokens)])
        target_host.tensor[20:26] = source_host.tensor[table]
        target_blocks.move(Way.BACK, range(20, 26), range(20, 26))
        sequence.block_table = list(range(20, 32))
        assert generate(target, sequence, 12) == expected
    finally:
        group.close()
