"""Ranks on two devices generate what one device does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.engine.group_executor import GroupExecutor
from baton.engine.kv_pool import KVPool
from baton.engine.model_config import DecoderConfig
from baton.engine.rank_process import GroupSpec
from baton.engine.torch_executor import TorchExecutor
from tests.integration.engine import families
from tests.integration.engine.sequences import Sequence, generate

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
        device="cuda",
        memory=None,
        num_threads=1,
        timeout_s=60.0,
    )
    group = GroupExecutor.start(spec)
    try:
        assert generate(group, Sequence("a", prompt, list(range(12))), 12, chunks=(7, 2)) == expected
    finally:
        group.close()
