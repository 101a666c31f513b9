"""What a benchmark says of the machine."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.machine import tree_cpu_s

BURNT_S = 0.2
BURN = f"""
import time
while time.process_time() < {BURNT_S}: pass
print("burnt", flush=True)
input()
"""


def test_processor_time_of_children_counts_while_they_run_and_after_their_end():
    before_s = tree_cpu_s()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        # Ticks are hundredths of a second, and each of the times that are added up is rounded down.
        assert tree_cpu_s() - before_s >= BURNT_S - 0.05
        child.communicate(b"\n")
    assert tree_cpu_s() - before_s >= BURNT_S - 0.05
