"""What runs in other processes than the test: a rank with too little memory, a parent that is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

LONG_STEP_TOKENS = 200


def run_short_of_memory(name: str) -> None:
    """Makes steps of LONG_STEP_TOKENS fail in the second half of a layer, as the allocator does. A `set_up_log`."""
    from baton.engine.model import DecoderModel

    assert name == "engine_rank_1"
    whole = DecoderModel._mlp

    def mlp(self: DecoderModel, layer: Any, x: Any) -> Any:
        if len(x) == LONG_STEP_TOKENS:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return whole(self, layer, x)

    DecoderModel._mlp = mlp  # type: ignore[method-assign]


if __name__ == "__main__":
    from tests.integration.engine.test_group_executor import rank_pids, start

    executor, _ = start(Path(sys.argv[1]))
    print(*rank_pids(), flush=True)
    time.sleep(600)
