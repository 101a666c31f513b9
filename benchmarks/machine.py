"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
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


def _value(info: str, key: str) -> str:
    return next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith(key)), "")
