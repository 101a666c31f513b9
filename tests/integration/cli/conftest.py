from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISE = Path(__file__).with_name("supervise.py")


class Supervised:
    """A running `supervise.py` and the events it told so far."""

    def __init__(self, stages: list[list[dict]]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SUPERVISE), json.dumps(stages)], stdout=subprocess.PIPE, text=True
        )
        self.events: list[dict] = []

    def wait_for(self, **wanted: object) -> dict:
        """Reads events until one has all of `wanted`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if wanted.items() <= event.items():
                return event
        raise AssertionError(f"no {wanted} among {self.events}")

    def wait_ready(self, *names: str) -> None:
        waiting = set(names)
        while waiting:
            waiting.discard(self.wait_for(state="ready")["name"])

    def find_line(self, name: str, start: str) -> str:
        """The first line of `name` that begins so, which may come after the news that it is ready."""
        for event in self.events:
            if event["name"] == name and event.get("line", "").startswith(start):
                return event["line"]
        while not (line := self.wait_for(name=name).get("line", "")).startswith(start):
            pass
        return line

    def pids(self, name: str) -> list[int]:
        """Process ids of all lives of `name`."""
        return [event["pid"] for event in self.events if event.get("name") == name and "pid" in event]

    @staticmethod
    def is_alive(pid: int) -> bool:
        """Whether `pid` runs; a zombie does not."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat[stat.rindex(")") + 2] not in "ZX"

    def alive(self) -> list[int]:
        """Children of all lives that still run."""
        return list(filter(self.is_alive, self.all_pids()))

    def wait_all_dead(self) -> None:
        """Returns when the children of all lives are dead."""
        for pid in self.all_pids():
            self.wait_dead(pid)

    def wait_dead(self, pid: int, timeout_s: float = 20.0) -> None:
        """Polls: nobody tells when a process ends that is not our child, nor is it dead once it is killed."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_alive(pid):
            assert time.monotonic() < deadline_s, f"{pid} still runs"
            time.sleep(0.02)

    def all_pids(self) -> list[int]:
        return [event["pid"] for event in self.events if "pid" in event]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_end(self) -> int:
        """Reads the rest and returns the exit code."""
        assert self.process.stdout is not None
        self.events += [json.loads(line) for line in self.process.stdout]
        return self.process.wait(30)


@pytest.fixture
def supervise():
    started: list[Supervised] = []

    def start(*stages: list[dict]) -> Supervised:
        started.append(Supervised(list(stages)))
        return started[-1]

    yield start
    for one in started:
        for pid in one.all_pids():
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        one.process.kill()
        one.process.wait()
        one.process.stdout.close()
