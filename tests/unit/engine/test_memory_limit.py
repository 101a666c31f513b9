from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from baton.engine.memory_limit import available_bytes, has_device, host_memory, memory_of

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
MACHINE = 8 * GIB
UNLIMITED_V1 = "9223372036854771712"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    lines = f"MemTotal: {MACHINE // 1024} kB\nMemAvailable: {GIB // 1024} kB\nHugePages_Total: 0\n"
    (root / "proc/meminfo").write_text(lines)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, MACHINE),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {"memory.max": str(2 * GIB)}, 2 * GIB),
        # The limit of a group around this one holds too, and so does that of the machine.
        ("0::/a/b\n", {"a/memory.max": str(GIB), "a/b/memory.max": str(2 * GIB)}, GIB),
        ("0::/a/b\n", {"a/memory.max": "max", "a/b/memory.max": str(3 * GIB)}, 3 * GIB),
        ("0::/a\n", {"a/memory.max": str(99 * GIB)}, MACHINE),
        ("4:memory:/a\n3:cpu,cpuacct:/\n", {"memory/a/memory.limit_in_bytes": str(GIB)}, GIB),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": UNLIMITED_V1}, MACHINE),
        # The host's path, which a container does not see: its own group is mounted at the top.
        ("4:memory:/docker/x\n", {"memory/memory.limit_in_bytes": str(GIB)}, GIB),
        # Both versions at once.
        ("4:memory:/a\n0::/a\n", {"memory/a/memory.limit_in_bytes": str(2 * GIB), "a/memory.max": str(GIB)}, GIB),
    ],
)
def test_the_lowest_limit_counts(tmp_path, cgroup, files, expected):
    memory = host_memory(machine(tmp_path, cgroup, files))
    assert (memory.total_bytes, memory.usable_bytes, memory.is_host) == (expected, expected, True)
    assert ("container" in memory.name) is (expected < MACHINE)


def test_this_machine_has_memory(tmp_path):
    memory = memory_of("cpu")
    assert 1 << 28 < memory.total_bytes < 1 << 50
    assert 0 < available_bytes() < 1 << 50
    assert available_bytes(machine(tmp_path, "0::/\n", {})) == GIB
    assert has_device("cpu")
    assert not has_device("cuda:99")
