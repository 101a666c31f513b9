from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.core import ids


def test_host_id_is_the_same_in_two_processes_and_names_the_mount() -> None:
    other = subprocess.run(
        [sys.executable, "-c", "from baton.core.ids import host_id; print(host_id())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert ids.host_id() == other
    assert ids.host_id().endswith(f"-{os.stat('/dev/shm').st_dev}")


def test_a_host_without_shared_memory_equals_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_SHM_FOLDER", Path("/nonexistent"))
    assert ids.host_id() != ids.host_id()


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (ids.new_incarnation, r"[0-9a-f]{16}"),
        (ids.new_attempt_id, r"[0-9a-f]{32}"),
        (ids.new_request_id, r"req-[0-9a-f]{24}"),
    ],
)
def test_ids_are_distinct_and_well_formed(make, pattern: str) -> None:
    made = {make() for _ in range(200)}
    assert len(made) == 200
    assert all(re.fullmatch(pattern, one) for one in made)
