"""How much memory there is: of a CUDA device, or of the container or machine that a process runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

# Where a cgroup v1 has no limit it says a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """`total_bytes` is what a fraction is taken of, `usable_bytes` what a process can get of it at most.

    `name` says whose limit it is, as it goes into a sentence.
    """

    total_bytes: int
    usable_bytes: int
    name: str
    is_host: bool


def has_device(device: str) -> bool:
    """Whether PyTorch can compute on `device` here."""
    index = torch.device(device).index or 0
    return device == "cpu" or (torch.cuda.is_available() and index < torch.cuda.device_count())


def memory_of(device: str) -> MemoryLimit:
    """The memory of `device`: cpu, cuda or cuda:N, which must be there. Blocks shortly."""
    if torch.device(device).type == "cpu":
        return host_memory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryLimit(total_bytes=total_bytes, usable_bytes=free_bytes, name=f"free on {device}", is_host=False)


def host_memory(root: Path = Path("/")) -> MemoryLimit:
    """The lowest of the limits of this process's cgroups (v1 and v2) and the machine's memory.

    `root` is where proc and sys are mounted.
    """
    machine_bytes = _meminfo(root)["MemTotal"]
    limits = [limit for folder, file in _cgroups(root) if (limit := _lowest(root, folder, file)) is not None]
    if limits and min(limits) < machine_bytes:
        limit_bytes, name = min(limits), "the container's memory limit"
    else:
        limit_bytes, name = machine_bytes, "the machine's memory"
    return MemoryLimit(total_bytes=limit_bytes, usable_bytes=limit_bytes, name=name, is_host=True)


def available_bytes(root: Path = Path("/")) -> int:
    """What the machine could give now without swapping, by the kernel's own estimate."""
    return _meminfo(root)["MemAvailable"]


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


def _cgroups(root: Path) -> list[tuple[Path, str]]:
    """The folder of each memory cgroup that this process is in, and the name of its limit's file."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((root / "sys/fs/cgroup" / path.lstrip("/"), "memory.max"))
        elif "memory" in controllers.split(","):
            found.append((root / "sys/fs/cgroup/memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    return found


def _lowest(root: Path, folder: Path, file: str) -> int | None:
    """The lowest limit of a cgroup and those around it; None when there is none.

    Inside a container the path may be the host's, which is not mounted: its own cgroup is at the top then.
    """
    top = root / "sys/fs/cgroup"
    limits = []
    while folder.is_relative_to(top):
        try:
            text = (folder / file).read_text().strip()
        except OSError:
            text = "max"
        if text.isdecimal() and int(text) < _NO_LIMIT:
            limits.append(int(text))
        folder = folder.parent
    return min(limits, default=None)
