"""`baton up` with its real components, over a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.fixtures.processes import descendants, free_port, segments_of

ROOT = Path(__file__).parents[3]


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

    async def start(*flags: str, cwd: Path = ROOT, **environment: str) -> Up:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton.cli", "up", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT), "BATON_ENGINE__KV_CACHE_BYTES": "16MiB", **environment},
            cwd=cwd,
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
    up = await start_up("--demo", "--model", str(random_llama(512)), "--port", str(free_port()))
    redis_socket = Path((await up.wait_for("redis", "ready after")).split()[-1])
    await up.wait_for("is served at", "Ctrl-C ends it")
    phases = re.findall(r"prefill_worker │ start-up: ([\w-]+) \(([\w-]+) took \d+\.\d s\)", "".join(up.lines))
    expected = ["import", "configure", "allocate", "load", "tokenizer", "warm-up", "done"]
    assert phases == list(zip(expected[1:], expected[:-1], strict=True))
    processes = descendants(up.process.pid)
    engines = [command for command in processes.values() if "-m baton.engine.child" in command]
    assert sorted(command.split()[4] for command in engines) == ["decode_worker", "prefill_worker"]
    assert all(socket.gethostname() in command for command in engines)  # it is in the workers' ids
    segments = segments_of(up.process.pid)
    assert segments

    worker = next(pid for pid, command in processes.items() if "-m prefill_worker" in command)
    os.kill(worker, signal.SIGKILL)
    await up.wait_for("prefill_worker", "restarting killed by SIGKILL")
    await up.wait_for("prefill_worker", "ready after")
    processes |= descendants(up.process.pid)
    segments |= segments_of(up.process.pid)

    up.process.send_signal(signal.SIGINT)
    code, out = await up.rest()
    assert code == 0, "".join(up.lines)
    assert "you> What is the capital of France" in out
    assert "first after" in out, "".join(up.lines)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not redis_socket.parent.exists()
    assert not [segment for segment in segments if Path(segment).exists()]


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


@pytest.mark.parametrize(
    ("model_type", "weights", "words"),
    [
        ("llama", None, "no *.safetensors file"),
        ("llama", b"\x10\0\0\0\0\0\0\0{", "is not a complete safetensors file"),
        ("mamba", b"\2\0\0\0\0\0\0\0{}", "model_type 'mamba' is not supported"),
    ],
)
async def test_a_broken_model_folder_is_told_before_anything_starts(start_up, tmp_path, model_type, weights, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer.json").write_text("{}")
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    up = await start_up("--model", str(tmp_path), "--port", str(free_port()))
    line = await fails(up)
    assert line.startswith(f"baton: model.path: {tmp_path}")
    assert words in line
    assert len(up.lines) == 1


async def test_a_file_without_a_model_keeps_the_default_one(start_up, tmp_path):
    file = tmp_path / "baton.yaml"
    file.write_text("engine: {dtype: float32}\n")
    up = await start_up("--config", str(file), cwd=tmp_path)
    assert "model.path: .cache/models/SmolLM2-135M-Instruct is no folder" in await fails(up)
    file.write_text("model: {path: /nowhere/named}\n")
    up = await start_up("--config", str(file), cwd=tmp_path)
    assert "model.path: /nowhere/named is no folder" in await fails(up)


@pytest.mark.parametrize(
    ("command", "imported", "code"),
    [
        ("baton.cli", "typer", 130),
        ("gateway", "uvloop", -signal.SIGINT),
        ("prefill_worker", "uvloop", -signal.SIGINT),
        ("decode_worker", "uvloop", -signal.SIGINT),
    ],
)
async def test_ctrl_c_while_libraries_are_imported_leaves_no_traceback(tmp_path, command, imported, code):
    (tmp_path / f"{imported}.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", command, "up"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
    )
    assert await process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert (process.returncode, err) == (code, b"")


async def test_no_redis(start_up, random_llama):
    port = free_port()
    flags = ["--model", str(random_llama(512)), "--port", str(free_port())]
    up = await start_up(*flags, "--redis-url", f"redis://127.0.0.1:{port}/0")
    line = await fails(up)
    assert "redis" in line.lower()
    assert str(port) in line
    assert not [line for line in up.lines if line.startswith("redis")]
