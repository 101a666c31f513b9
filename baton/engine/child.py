"""An engine process: `python -m baton.engine.child WORDS... DESCRIPTOR PARENT_PID`.

The words are for who reads the list of processes; what to run comes through the descriptor.
"""

from __future__ import annotations

import sys

from baton.engine.channel import run_child

if __name__ == "__main__":
    run_child(int(sys.argv[-2]), int(sys.argv[-1]))
