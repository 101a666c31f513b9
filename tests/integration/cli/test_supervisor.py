"""The supervisor over real processes, with real signals."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest


def child(name: str, *args: str, **more: object) -> dict:
    return {"name": name, "args": list(args), **more}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all_in_order(supervise, number):
    running = supervise([child("worker"), child("other")], [child("gateway")])
    running.wait_ready("worker", "other", "gateway")
    running.signal(number)
    assert running.wait_end() == 0
    ended = [event["name"] for event in running.events if event.get("state") == "ended"]
    assert ended[0] == "gateway"
    assert sorted(ended) == ["gateway", "other", "worker"]
    assert not running.alive()


def test_children_do_not_get_the_terminals_signals(supervise):
    running = supervise([child("worker")])
    running.wait_ready("worker")
    (pid,) = running.pids("worker")
    assert os.getpgid(pid) == pid


def test_output_arrives_by_line_and_name(supervise):
    running = supervise([child("worker")])
    running.wait_ready("worker")
    (pid,) = running.pids("worker")
    assert running.find_line("worker", "hello") == f"hello from {pid}"


def test_killed_child_comes_back_and_its_helpers_are_gone(supervise):
    running = supervise([child("worker", "--helper"), child("other")])
    running.wait_ready("worker", "other")
    (first,) = running.pids("worker")
    helper = int(running.find_line("worker", "helper").split()[1])
    assert running.is_alive(helper)
    os.kill(first, signal.SIGKILL)
    event = running.wait_for(name="worker", state="restarting")
    assert "killed by SIGKILL" in event["detail"]
    running.wait_dead(helper)
    running.wait_ready("worker")
    assert len(running.pids("worker")) == 2
    assert len(running.pids("other")) == 1
    running.signal(signal.SIGTERM)
    assert running.wait_end() == 0
    assert not running.alive()


def test_child_that_cannot_start_ends_all_with_its_reason(supervise):
    running = supervise([child("other")], [child("worker", "--refuse", "worker: model.path: /nowhere is no folder")])
    assert running.wait_end() == 1
    assert running.events[-1] == {"failure": "worker: model.path: /nowhere is no folder"}
    assert len(running.pids("worker")) == 1
    assert not running.alive()


def test_five_quick_deaths_end_all(supervise):
    running = supervise([child("worker", "--live", "0"), child("other")])
    assert running.wait_end() == 1
    assert running.events[-1] == {"failure": "worker: killed by SIGABRT"}
    assert len(running.pids("worker")) == 5
    delays = [event["detail"] for event in running.events if event.get("state") == "restarting"]
    assert [detail.rsplit("again in ")[1] for detail in delays] == ["0.05 s", "0.1 s", "0.2 s", "0.4 s"]
    assert not running.alive()


def test_second_signal_kills(supervise):
    running = supervise([child("worker", "--stubborn", drain_s=1000)])
    running.wait_ready("worker")
    running.signal(signal.SIGINT)
    running.wait_for(name="worker", state="ending")
    running.signal(signal.SIGINT)
    assert running.wait_end() == 0
    assert {"name": "worker", "line": "asked to end a second time: killed"} in running.events
    assert not running.alive()


def test_child_that_does_not_drain_in_time_is_killed(supervise):
    running = supervise([child("worker", "--stubborn", drain_s=0.2)])
    running.wait_ready("worker")
    running.signal(signal.SIGINT)
    assert running.wait_end() == 0
    assert {"name": "worker", "line": "did not end in time: killed"} in running.events
    assert not running.alive()


def test_children_end_when_the_supervisor_is_killed(supervise):
    running = supervise([child("redis")], [child("worker", needs=["redis"])])
    running.wait_ready("redis", "worker")
    running.signal(signal.SIGKILL)
    running.wait_all_dead()
    folder = next(Path(event["detail"]).parent for event in running.events if event.get("state") == "ready")
    shutil.rmtree(folder, ignore_errors=True)  # nobody was left to remove it


def test_wedged_child_is_shown_as_not_ready(supervise):
    running = supervise([child("redis")])
    running.wait_ready("redis")
    (pid,) = running.pids("redis")
    os.kill(pid, signal.SIGSTOP)
    running.wait_for(name="redis", state="not ready")
    os.kill(pid, signal.SIGCONT)
    running.wait_for(name="redis", state="ready")
    running.signal(signal.SIGTERM)
    assert running.wait_end() == 0


def test_embedded_redis_comes_back_at_its_address_and_leaves_nothing(supervise):
    running = supervise([child("redis")], [child("worker", needs=["redis"])])
    running.wait_ready("redis", "worker")
    address = next(event["detail"] for event in running.events if event.get("state") == "ready")
    os.kill(running.pids("redis")[0], signal.SIGKILL)
    found = running.wait_for(name="redis", state="ready")["detail"]
    assert found == address
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(address)
    assert len(running.pids("worker")) == 1
    running.signal(signal.SIGTERM)
    assert running.wait_end() == 0
    assert not Path(address).parent.exists()
    assert not running.alive()


def test_children_wait_for_what_they_need(supervise):
    running = supervise([child("redis")], [child("worker", needs=["redis"])])
    running.wait_ready("redis", "worker")
    states = [(event["name"], event["state"]) for event in running.events if "state" in event]
    assert states.index(("redis", "ready")) < states.index(("worker", "starting"))


def test_stop_before_anything_is_ready(supervise):
    running = supervise([child("worker"), child("other", needs=["worker"])])
    running.wait_for(name="worker", state="starting")
    started_s = time.monotonic()
    running.signal(signal.SIGTERM)
    assert running.wait_end() == 0
    assert time.monotonic() - started_s < 25
    assert not running.alive()
