"""An engine process: `python -m baton.engine.child WORDS... DESCRIPTOR PARENT_PID`.

The words are for who reads the list of processes; what to run comes through the descriptor.
"""

from __future__ import annotations

import os
import sys

from baton.engine.channel import run_child

if __name__ == "__main__":
    # PyTorch's threads would spin for milliseconds after each small operation, on cores that our kernels' threads and
    # other engines need. Read when torch is loaded, which nothing has done yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run_child(int(sys.argv[-2]), int(sys.argv[-1]))
