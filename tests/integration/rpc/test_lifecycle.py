from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from typing import ClassVar
    from baton.core.config import ComponentSettings
    from baton.core.errors import StartupError
    from baton.core.settings import ServerSettings
    from baton.rpc.lifecycle import run_component

    class Settings(ComponentSettings):
        "A component."
        class_name: ClassVar[str] = "gateway"
        server: ServerSettings = ServerSettings()
        mode: str = "serve"

    async def fail():
        raise StartupError("server.port: taken")

    async def serve(settings, stop):
        if settings.mode == "startup":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        if settings.mode == "bug":
            raise ValueError("bug")
        print(type(asyncio.get_running_loop()).__module__, flush=True)
        await stop.wait()
        print("draining", flush=True)
        if settings.mode == "stuck":
            await asyncio.Event().wait()

    sys.exit(run_component(Settings, serve, sys.argv[1:]))
    """
)


@pytest.fixture
def start(tmp_path: Path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    started: list[subprocess.Popen[str]] = []

    def run(*argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(file), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_code_is_0(start, number: signal.Signals) -> None:
    process = start()
    assert process.stdout.readline() == "uvloop\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("draining\n", "", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start, number: signal.Signals) -> None:
    process = start("--mode", "stuck")
    process.stdout.readline()
    process.send_signal(number)
    assert process.stdout.readline() == "draining\n"
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == -number


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--server.port", "70000"],
            "server.port: should be less than or equal to 65535, got '70000' (flag --server.port)",
        ),
        (["--mode", "startup"], "server.port: taken"),
    ],
    ids=["settings", "startup"],
)
def test_what_keeps_it_from_starting_is_one_line(start, argv: list[str], line: str) -> None:
    process = start(*argv)
    out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ("", f"gateway: {line}\n", 1)


def test_a_bug_shows_its_traceback(start) -> None:
    process = start("--mode", "bug")
    _, err = process.communicate(timeout=20)
    assert "ValueError: bug" in err
    assert process.returncode == 1


def test_help_ends_with_0(start) -> None:
    process = start("--help")
    out, _ = process.communicate(timeout=20)
    assert "--server.port" in out
    assert process.returncode == 0
