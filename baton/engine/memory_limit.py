"""How much memory there is: of a CUDA device, or of the container or machine that a process runs in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.core.cgroup import memory_limit
from baton.core.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """`total_bytes` is what a fraction is taken of, `usable_bytes` what a process can get of it at most.

    `name` says whose limit it is, as it goes into a sentence.
    """

    total_bytes: int
    usable_bytes: int
    name: str
    is_host: bool

    def times(self, number: float) -> MemoryLimit:
        """That of so many devices like this one."""
        total_bytes, usable_bytes = int(self.total_bytes * number), int(self.usable_bytes * number)
        return replace(self, total_bytes=total_bytes, usable_bytes=usable_bytes)


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


def memory_of_rank(device: str, num_ranks: int) -> MemoryLimit:
    """What one of `num_ranks` ranks has: on CUDA that of the first device, on a CPU the memory of all.

    The other devices are taken to be like it: to ask one costs some hundred MiB of it. StartupError when there are
    fewer than ranks. Blocks shortly.
    """
    if device == "cpu" or num_ranks == 1:
        return memory_of(device)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices < num_ranks:
        raise StartupError(
            f"engine.tensor_parallel_size: {num_ranks} ranks take a CUDA device each, {num_devices} are visible"
        )
    return memory_of("cuda:0")


def host_memory(root: Path = Path("/")) -> MemoryLimit:
    """The lowest of the limits of this process's cgroups (v1 and v2) and the machine's memory.

    `root` is where proc and sys are mounted.
    """
    machine_bytes = _meminfo(root)["MemTotal"]
    limit_bytes, name = memory_limit(root), "the container's memory limit"
    if limit_bytes is None or limit_bytes >= machine_bytes:
        limit_bytes, name = machine_bytes, "the machine's memory"
    return MemoryLimit(total_bytes=limit_bytes, usable_bytes=limit_bytes, name=name, is_host=True)


def available_bytes(root: Path = Path("/")) -> int:
    """What the machine could give now without swapping, by the kernel's own estimate."""
    return _meminfo(root)["MemAvailable"]


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
