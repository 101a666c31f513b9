"""The embedded Redis leaves nothing behind, however its owner ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.coordination.embedded import EmbeddedRedis

OWNER = """
import os, signal
from baton.coordination.embedded import EmbeddedRedis
redis = EmbeddedRedis()
redis.start()
print(redis.url, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("unix://").partition("?")[0]).parent


@pytest.fixture
def left_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an owner left that was killed, where nobody else starts one."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    folder = folder_of(ended.stdout.strip())
    assert folder.is_dir()
    return folder


def test_the_next_start_removes_what_a_killed_owner_left_and_nothing_else(left_folder: Path) -> None:
    with EmbeddedRedis() as living:
        assert not left_folder.exists()
        with EmbeddedRedis() as other:
            assert folder_of(living.url).is_dir()
            others = folder_of(other.url)
        assert not others.exists()
        assert folder_of(living.url).is_dir()
