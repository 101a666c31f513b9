"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and how busy the machine is with other things just now."""
    import torch

    info = Path("/proc/cpuinfo").read_text()
    flags = _value(info, "flags").split()
    load_1m, load_5m, _ = os.getloadavg()
    return {
        "processor": _value(info, "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in INSTRUCTION_SETS if name in flags],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average_1m": load_1m,
        "load_average_5m": load_5m,
    }


def busy_share(seconds: float = 1.0) -> float:
    """Part of the cores that other work takes just now, 0 to 1; to be asked while we do nothing. Blocks for `seconds`.

    It goes with every figure, because what shares the cores with a system slows it by more than its share: threads
    that wait for one another all wait for the one that was preempted.
    """
    busy_before, all_before = _cpu_ticks()
    time.sleep(seconds)
    busy, total = _cpu_ticks()
    return (busy - busy_before) / max(1, total - all_before)


def tree_cpu_s() -> float:
    """Processor seconds, in user and system mode, that this process and all below it have taken so far.

    Those of a process that has ended are counted once its parent has waited for it.
    """
    taken: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # One that ends just now is none of ours, or its parent has it.
            with suppress(FileNotFoundError, ProcessLookupError):
                # The name before it may hold anything, so what follows is counted from its end.
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
                # Its own time in both modes, and that of the children it has waited for.
                taken[int(entry.name)] = sum(map(int, fields[11:15]))
    ticks, tree = 0, [os.getpid()]
    while tree:
        process_id = tree.pop()
        ticks += taken[process_id]
        tree += children.get(process_id, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def _cpu_ticks() -> tuple[int, int]:
    """(busy, all) ticks of all cores since the machine started. What the host takes away counts as busy."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _value(info: str, key: str) -> str:
    return next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith(key)), "")
