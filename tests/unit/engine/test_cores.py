from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from baton.core.errors import StartupError
from baton.engine import cores
from baton.engine.cores import STALE_S, CoreShare


class Host:
    """Engines that divide `num_cores`, on one clock."""

    def __init__(self, path, num_cores: int) -> None:
        self.path, self.num_cores, self.now_ns = path, num_cores, 10**12

    def engine(self, most: int = 64) -> CoreShare:
        return CoreShare(most, num_cores=self.num_cores, path=self.path, now_ns=lambda: self.now_ns)


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path / "cores", 8)


def test_a_lone_engine_has_all_cores_but_never_more_than_its_most(host):
    assert host.engine().take() == 8
    assert host.engine(3).take() == 3


def test_those_that_compute_divide_the_cores_and_those_that_rest_have_none(host):
    first, second, third = (host.engine() for _ in range(3))
    assert first.take() == 8
    assert second.take() == 4
    assert first.take() == 4
    assert third.take() == 2
    second.rest()
    assert first.take() == 4
    third.rest()
    assert first.take() == 8


def test_more_engines_than_cores_have_a_thread_each(tmp_path):
    host = Host(tmp_path / "cores", 2)
    engines = [host.engine() for _ in range(5)]
    assert [engine.take() for engine in engines] == [2, 1, 1, 1, 1]


def test_an_engine_that_closed_leaves_its_place_and_its_cores(host):
    first, second = host.engine(), host.engine()
    second.take()
    second.close()
    assert first.take() == 8
    third = host.engine()
    third.take()
    assert first.take() == 4


def test_an_engine_that_was_killed_in_a_step_counts_for_a_while_only(host):
    code = (
        "import sys, time; from pathlib import Path; from baton.engine.cores import CoreShare\n"
        f"share = CoreShare(8, num_cores=8, path=Path({str(host.path)!r}), now_ns=lambda: {host.now_ns})\n"
        "print(share.take(), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"8\n"
        engine = host.engine()
        assert engine.take() == 4
        os.kill(process.pid, signal.SIGKILL)
    assert engine.take() == 4
    host.now_ns += int(STALE_S * 1e9)
    assert engine.take() == 8


def test_the_place_of_one_that_was_killed_is_taken_again(host, monkeypatch):
    monkeypatch.setattr(cores, "_MAX_ENGINES", 1)
    code = (
        "import os, signal; from pathlib import Path; from baton.engine import cores; cores._MAX_ENGINES = 1\n"
        f"cores.CoreShare(8, num_cores=8, path=Path({str(host.path)!r})).take()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    engine = host.engine()
    assert engine.take() == 8
    with pytest.raises(StartupError, match="1 engines run on this host already"):
        host.engine()


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    with pytest.raises(StartupError, match=r"nowhere/cores: No such file or directory"):
        CoreShare(1, num_cores=1, path=tmp_path / "nowhere" / "cores")
