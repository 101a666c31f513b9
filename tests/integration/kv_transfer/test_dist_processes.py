"""The torch.distributed transport between processes, and between two network namespaces."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
SCRIPT = "tests.integration.kv_transfer.dist_process"
# A busy machine may keep either side from going on for a while; who waits in vain does not wait for long.
TIMEOUT_S, SHORT_TIMEOUT_S = 60.0, 2.0


class Side:
    """One side's process, spoken to in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, line: str = "") -> dict[str, Any]:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())


@contextmanager
def run(*arguments: str, namespace: str | None = None) -> Iterator[Side]:
    within = ["ip", "netns", "exec", namespace] if namespace else []
    with subprocess.Popen(
        [*within, sys.executable, "-m", SCRIPT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield Side(process)
        finally:
            process.kill()


@contextmanager
def pair(
    host: str = "127.0.0.1",
    namespaces: tuple[str | None, str | None] = (None, None),
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Side, Side]]:
    with ExitStack() as stack:
        source = stack.enter_context(run("source", host, str(timeout_s), namespace=namespaces[0]))
        found = source.hear()
        reader = stack.enter_context(run("reader", json.dumps(found), str(timeout_s), namespace=namespaces[1]))
        assert reader.hear() == {"ready": True}
        yield source, reader


def test_the_bytes_arrive_and_arrive_again_and_a_killed_reader_costs_the_source_nothing():
    with pair() as (source, reader):
        first, second = reader.ask("read"), reader.ask("read")
        assert first == second
        reader.process.kill()
        reader.process.wait()
        assert source.ask()["sha256"] == first["sha256"]
        assert source.process.wait(60) == 0


def read_well(reader: Side) -> None:
    """Reads until it succeeds: with the short time-out a read may fail because a machine is busy."""
    for _ in range(60):
        if "sha256" in reader.ask("read"):
            return
    raise AssertionError("no read succeeds")


def test_a_killed_source_ends_a_read_and_leaves_the_reader_alive():
    with pair(timeout_s=SHORT_TIMEOUT_S) as (source, reader):
        read_well(reader)
        source.process.kill()
        source.process.wait()
        answer = reader.ask("read")
        assert answer["error"] == "TRANSFER_FAILED"
        assert answer["after_s"] < SHORT_TIMEOUT_S + 30


def test_a_stopped_source_ends_a_read_within_the_time_out_and_is_read_again_when_it_goes_on():
    with pair(timeout_s=SHORT_TIMEOUT_S) as (source, reader):
        read_well(reader)
        source.process.send_signal(signal.SIGSTOP)
        try:
            answer = reader.ask("read")
        finally:
            source.process.send_signal(signal.SIGCONT)
        assert answer["error"] == "TRANSFER_FAILED"
        assert SHORT_TIMEOUT_S - 0.5 < answer["after_s"] < SHORT_TIMEOUT_S + 30
        # The source may still be busy with the call that was given up: for at most as long as that one's time-out.
        read_well(reader)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces that see each other as 10.250.0.1 and 10.250.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command to make network namespaces")
    tag = secrets.token_hex(3)
    names = (f"baton-{tag}-a", f"baton-{tag}-b")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", names[1])
        ip("link", "add", f"bt{tag}a", "netns", names[0], "type", "veth", "peer", f"bt{tag}b", "netns", names[1])
        for number, (name, end) in enumerate(zip(names, "ab", strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.250.0.{number}/24", "dev", f"bt{tag}{end}")
            ip("-n", name, "link", "set", f"bt{tag}{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_two_network_namespaces_are_two_hosts(namespaces):
    with pair("10.250.0.1", namespaces) as (source, reader):
        assert reader.ask("read")["sha256"] == source.ask()["sha256"]
