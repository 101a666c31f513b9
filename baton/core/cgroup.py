"""What containers limit, read from the kernel's control groups, v1 and v2."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where a cgroup v1 has no memory limit it says a number near 2**63.
_NO_LIMIT = 1 << 60


def usable_cores(root: Path = Path("/")) -> int:
    """The CPU cores that this process may use: those it may run on, or as many as its time is worth if that is less.

    `root` is where proc and sys are mounted. At least 1.
    """
    quotas = [quota for folder, is_v2 in _folders("cpu", root) if (quota := _cpu_quota(folder, is_v2)) is not None]
    return max(1, math.ceil(min([*quotas, len(os.sched_getaffinity(0))])))


def memory_limit(root: Path = Path("/")) -> int | None:
    """The lowest memory limit of the groups that this process is in, bytes; None when there is none."""
    limits = []
    for folder, is_v2 in _folders("memory", root):
        text = _read(folder / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if text.isdecimal() and int(text) < _NO_LIMIT:
            limits.append(int(text))
    return min(limits, default=None)


def _cpu_quota(folder: Path, is_v2: bool) -> float | None:
    """How many cores' time a group may take; None when it is not limited."""
    if is_v2:
        quota, _, period = _read(folder / "cpu.max").partition(" ")
    else:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of the groups that hold this process, each with those around it, and whether they are v2's.

    Inside a container the path may be the host's, which is not mounted: its own group is at the top then.
    """
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder = top / path.lstrip("/")
        elif controller in controllers.split(","):
            folder = top / controller / path.lstrip("/")
        else:
            continue
        while folder.is_relative_to(top):
            yield folder, not controllers
            folder = folder.parent


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text().strip()
    return ""
