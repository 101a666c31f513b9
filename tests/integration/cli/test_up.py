"""`baton up` with its real components, over a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import descendants

SHARED_MEMORY = Path("/dev/shm")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Up:
    """A running `baton up`, and its standard error line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def wait_for(self, *parts: str) -> str:
        """Reads lines until one has all of `parts`."""
        while line := (await self.process.stderr.readline()).decode():
            self.lines.append(line)
            if all(part in line for part in parts):
                return line
        raise AssertionError(f"no line with {parts} in:\n{''.join(self.lines)}")

    async def rest(self) -> tuple[int, str]:
        """Exit code and standard output, after the end."""
        out, err = await self.process.communicate()
        self.lines += err.decode().splitlines(keepends=True)
        return self.process.returncode, out.decode()


@pytest.fixture
async def start_up():
    started: list[Up] = []

    async def start(*flags: str, **environment: str) -> Up:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton.cli", "up", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "BATON_ENGINE__KV_CACHE_BYTES": "16MiB", **environment},
        )
        started.append(Up(process))
        return started[-1]

    yield start
    for up in started:
        if up.process.returncode is None:
            up.process.send_signal(signal.SIGINT)
            up.process.send_signal(signal.SIGINT)
            await up.process.communicate()


@pytest.mark.timeout(300)  # two starts of an engine
async def test_a_chat_then_a_death_then_an_end_without_a_trace(start_up, random_llama):
    segments = set(SHARED_MEMORY.iterdir())
    up = await start_up("--demo", "--model", str(random_llama(512)), "--port", str(free_port()))
    redis_socket = Path((await up.wait_for("redis", "ready after")).split()[-1])
    await up.wait_for("is served at", "Ctrl-C ends it")
    processes = descendants(up.process.pid)
    engines = [pid for pid, command in processes.items() if "engine" in command]
    assert len(engines) == 2
    # The file through which engines divide the cores stays: it is the host's.
    new_segments = {path for path in set(SHARED_MEMORY.iterdir()) - segments if "cores" not in path.name}
    assert new_segments

    worker = next(pid for pid, command in processes.items() if "-m prefill_worker" in command)
    os.kill(worker, signal.SIGKILL)
    await up.wait_for("prefill_worker", "restarting killed by SIGKILL")
    await up.wait_for("prefill_worker", "ready after")
    processes |= descendants(up.process.pid)

    up.process.send_signal(signal.SIGINT)
    code, out = await up.rest()
    assert code == 0, "".join(up.lines)
    assert "you> What is the capital of France" in out
    assert "first after" in out, "".join(up.lines)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not redis_socket.parent.exists()
    assert not new_segments & set(SHARED_MEMORY.iterdir())


async def fails(up: Up) -> str:
    """The last line of a start that must fail without a traceback."""
    code, out = await up.rest()
    assert code == 1, "".join(up.lines)
    assert out == ""
    assert "Traceback" not in "".join(up.lines)
    return up.lines[-1]


async def test_taken_port(start_up, random_llama):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = await start_up("--model", str(random_llama(512)), "--port", str(port))
        assert await fails(up) == f"baton: server.port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        assert len(up.lines) == 1


async def test_missing_model_folder(start_up):
    up = await start_up("--model", "/nowhere/model")
    assert await fails(up) == "baton: model.path: /nowhere/model is no folder; `make model` fetches the sample model\n"


async def test_bad_setting(start_up, random_llama):
    up = await start_up("--model", str(random_llama(512)), BATON_SERVER__PORT="99999")
    line = await fails(up)
    assert "server.port" in line
    assert "65535" in line
    assert "99999" in line


async def test_broken_model_folder(start_up, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    up = await start_up("--model", str(tmp_path), "--port", str(free_port()))
    line = await fails(up)
    assert line.startswith("baton: ")
    assert str(tmp_path) in line


async def test_no_redis(start_up, random_llama):
    port = free_port()
    flags = ["--model", str(random_llama(512)), "--port", str(free_port())]
    up = await start_up(*flags, "--redis-url", f"redis://127.0.0.1:{port}/0")
    line = await fails(up)
    assert "redis" in line.lower()
    assert str(port) in line
    assert not [line for line in up.lines if line.startswith("redis")]
