"""What runs in other processes than the test: a rank with too little memory, a parent that is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

LONG_STEP_TOKENS = 200
UNLUCKY_BLOCK = 97
_FAILED_ALLOCATION = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."


def run_short_of_memory(name: str) -> None:
    """Makes steps of LONG_STEP_TOKENS fail in the second half of a layer, as the allocator does, and so copies of
    UNLUCKY_BLOCK to the host copy. A `set_up_log`.
    """
    from baton.engine.host_copy import HostCopy
    from baton.engine.model import DecoderModel

    if name != "engine_rank_1":
        return
    whole, store = DecoderModel._add_mlp, HostCopy._store

    def add_mlp(self: DecoderModel, hidden: Any, layer: Any) -> None:
        if len(hidden) == LONG_STEP_TOKENS:
            raise RuntimeError(_FAILED_ALLOCATION)
        whole(self, hidden, layer)

    def put_out(self: HostCopy, block_ids: Any, host_ids: Any) -> None:
        if UNLUCKY_BLOCK in block_ids:
            raise RuntimeError(_FAILED_ALLOCATION)
        store(self, block_ids, host_ids)

    HostCopy._store = put_out  # type: ignore[method-assign]
    DecoderModel._add_mlp = add_mlp  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.integration.engine.test_group_executor import rank_pids, start

    executor, _ = start(Path(sys.argv[1]))
    print(*rank_pids(), flush=True)
    time.sleep(600)
