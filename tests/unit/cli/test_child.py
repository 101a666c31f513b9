from __future__ import annotations

import asyncio
import os
import sys

import pytest

from baton.cli.child import MAX_LINE_BYTES, Child, ChildExit


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


async def run(code: str) -> tuple[ChildExit, list[str]]:
    lines: list[str] = []
    return await Child(python(code), lines.append, address="").wait(), lines


async def test_exit_code_and_last_error_line():
    ended, lines = await run("import sys; print('out'); print('first\\nlast\\n', file=sys.stderr); sys.exit(3)")
    assert ended == ChildExit(code=3, last_error_line="last")
    assert ended.reason == "last"
    assert sorted(lines) == ["first", "last", "out"]


async def test_silent_death_by_signal_names_it():
    ended, _ = await run("import os; os.kill(os.getpid(), 15)")
    assert ended.code == -15
    assert ended.reason == "killed by SIGTERM"


async def test_endless_line_is_cut_and_bytes_that_are_no_text_are_replaced():
    ended, lines = await run("import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 1_000_000)")
    assert ended.code == 0
    assert lines[0][0] == "\ufffd"
    assert max(map(len, lines)) <= MAX_LINE_BYTES


async def test_unfinished_last_line_is_shown():
    assert (await run("print('no newline', end='')"))[1] == ["no newline"]


async def test_command_that_is_not_there():
    ended = await Child(["/nowhere/program"], lambda _: None, address="").wait()
    assert ended.code == 127
    assert ended.reason == "cannot run /nowhere/program: No such file or directory"


async def test_cancelled_wait_kills_the_child():
    child = Child(python("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"), print, address="")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await child.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_signals_after_the_end_are_no_error():
    child = Child(python(""), print, address="")
    await child.wait()
    child.terminate()
    child.kill()


async def test_pipe_kept_by_a_process_that_left_the_group_holds_nothing_up():
    code = (
        "import os, time\n"
        "seen, told = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); print(os.getpid(), flush=True); os.write(told, b'.'); time.sleep(1000)\n"
        "os.read(seen, 1)"
    )
    async with asyncio.timeout(60):
        ended, lines = await run(code)
    os.kill(int(lines[0]), 9)
    assert ended.code == 0
