from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from baton.core.errors import EngineFaultError, ResourceExhaustedError, StartupError, UnavailableError
from baton.engine.channel import ORPHAN_GRACE_S, Decoder, encode
from baton.engine.process import EngineDiedError, EngineProcess
from tests.integration.engine import engine_children as children
from tests.integration.engine.engine_children import Command, Event

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_traces_left():
    """Every test leaves the descriptors and child processes as it found them."""
    uvloop.new_event_loop().close()  # the first one opens a pipe that the process keeps
    before = descriptors(), child_pids()
    yield
    assert (descriptors(), child_pids()) == before


def descriptors():
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: target for fd, target in links.items() if not target.startswith("/proc")}


def child_pids():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@contextlib.asynccontextmanager
async def running(target, spec=None, **options):
    engine = await EngineProcess.start(target, spec, **options)
    try:
        yield engine
    finally:
        await engine.stop(60)


def assert_gone(pid, within_s):
    """Waits for the end of a process that is not ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], within_s)[0], f"process {pid} still runs after {within_s} s"
    finally:
        os.close(pidfd)


async def collect(engine):
    return [event.value async for batch in engine.events() for event in batch]


async def test_commands_go_in_and_events_come_out_in_order():
    async with running(children.echo, {"blocks": 3}) as engine:
        assert engine.facts["spec"] == {"blocks": 3}
        assert engine.facts["pid"] == engine.pid != os.getpid()
        for number in range(500):
            engine.send(Command("echo", number))
        values = []
        async for batch in engine.events():
            values += [event.value for event in batch]
            if len(values) == 500:
                break
        assert values == list(range(500))


def test_the_parent_needs_no_torch():
    code = "import sys, baton.engine.process; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"


async def test_stop_is_orderly_and_ends_the_events_after_the_last_one(tmp_path):
    async with running(children.last_words) as engine:
        async with asyncio.TaskGroup() as tasks:
            values = tasks.create_task(collect(engine))
            await engine.stop(60)
            await engine.stop(60)
        assert values.result() == ["goodbye"]
        assert not engine.is_alive
        with pytest.raises(EngineDiedError, match="exit code 0"):
            engine.send(Command("echo"))


@pytest.mark.parametrize(
    ("command", "exit_code", "signal_name", "message"),
    [
        (Command("kill", signal.SIGKILL), None, "SIGKILL", "the engine process was killed by SIGKILL"),
        (Command("kill", signal.SIGSEGV), None, "SIGSEGV", "the engine process was killed by SIGSEGV"),
        (Command("exit", 7), 7, None, "the engine process ended with exit code 7"),
        (
            Command("raise", RuntimeError("a secret prompt")),
            1,
            None,
            "the engine process ended with exit code 1 (RuntimeError)",
        ),
        (Command("raise", EngineFaultError("no luck")), 1, None, "the engine process ended with exit code 1 (no luck)"),
    ],
)
async def test_death_is_seen_at_once_and_says_how(command, exit_code, signal_name, message, capfd):
    async with running(children.echo) as engine:
        engine.send(command)
        started = time.monotonic()
        with pytest.raises(EngineDiedError) as death:
            await collect(engine)
        assert time.monotonic() - started < 60
        assert isinstance(death.value, UnavailableError)
        assert (death.value.exit_code, death.value.signal_name) == (exit_code, signal_name)
        assert (death.value.message, death.value.reason) == (message, "ENGINE_DIED")
        with pytest.raises(EngineDiedError):
            engine.send(Command("echo"))


async def test_what_was_emitted_before_death_still_arrives():
    async with running(children.echo) as engine:
        engine.send(Command("emit_then_kill"))
        assert await anext(engine.events()) == [Event("last words")]
        with pytest.raises(EngineDiedError, match="SIGKILL"):
            await anext(engine.events())


@pytest.mark.parametrize(
    ("target", "spec", "message"),
    [
        (children.refuse, "/models/x", "^/models/x: holds no config.json$"),
        (children.crash_at_start, None, "^MemoryError: no room for the pool$"),
        (children.die_at_start, signal.SIGKILL, "killed while it started; the machine may be out of memory$"),
        (children.die_at_start, signal.SIGABRT, "killed by SIGABRT while it started$"),
        (children.return_at_once, None, "ended with exit code 0 before it was ready$"),
    ],
)
async def test_a_failed_start_is_one_line(target, spec, message, capfd):
    with pytest.raises(StartupError, match=message) as refusal:
        await EngineProcess.start(target, spec)
    assert "\n" not in str(refusal.value)
    assert ("Traceback" in capfd.readouterr().err) == (target is children.crash_at_start)


async def test_a_start_without_end_is_given_up():
    with pytest.raises(StartupError, match=r"the prefill process was not ready within 0\.5 s"):
        await EngineProcess.start(children.never_ready, None, name="prefill", start_timeout_s=0.5)


async def test_a_cancelled_start_leaves_no_process():
    for delay_s in (0, 0.2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(delay_s):
                await EngineProcess.start(children.never_ready, None)


async def test_a_spec_that_cannot_be_sent_starts_nothing():
    with pytest.raises((TypeError, AttributeError)):
        await EngineProcess.start(children.echo, lambda: None)


async def test_a_deaf_engine_is_killed_after_the_grace():
    async with running(children.deaf) as engine:
        started = time.monotonic()
        await engine.stop(0.3)
        assert 0.3 <= time.monotonic() - started < 60
        assert_gone(engine.facts, 0)
        assert await collect(engine) == []


async def test_a_cancelled_stop_kills_at_once():
    async with running(children.deaf) as engine:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await engine.stop(60)
        assert not engine.is_alive


async def test_sends_never_block_and_are_bounded_with_room_for_aborts():
    async with running(children.echo) as engine:
        os.kill(engine.pid, signal.SIGSTOP)  # it reads nothing: a send that waited would wait for ever
        payload = b"x" * 2**20
        with pytest.raises(ResourceExhaustedError) as refusal:  # noqa: PT012 how many fit depends on the socket
            for _ in range(64):
                engine.send(Command("echo", payload))
        assert refusal.value.reason == "ENGINE_BEHIND"
        engine.send(Command("echo", "abort"), is_control=True)
        os.kill(engine.pid, signal.SIGCONT)
        async for batch in engine.events():
            if batch[-1] == Event("abort"):
                break
        engine.send(Command("echo", payload))


async def test_a_slow_reader_holds_the_engine_back_and_loses_nothing():
    async with running(children.echo) as engine:
        count = 20_000
        engine.send(Command("flood", count))
        await asyncio.sleep(0.5)
        assert len(engine._link._batches) < count / 2
        values = []
        async for batch in engine.events():
            values += [event.value for event in batch]
            if len(values) > count:
                break
        assert values[:count] == list(range(count))


async def test_an_engine_that_waits_for_its_reader_can_still_be_stopped():
    async with running(children.stuck_emitting) as engine:
        await asyncio.sleep(0.5)
        await engine.stop(60)
        assert engine._child.returncode == 0


async def test_an_idle_wait_is_ended_by_wake():
    async with running(children.echo) as engine:
        engine.send(Command("wake"))
        waited_s = (await anext(engine.events()))[0].value
        assert 0.04 < waited_s < 50


async def test_an_idle_wait_is_ended_by_its_time():
    async with running(children.echo) as engine:
        engine.send(Command("poll", 0.2))
        waited_s = (await anext(engine.events()))[0].value
        assert waited_s >= 0.2


async def test_the_terminals_signals_do_not_end_the_engine():
    async with running(children.echo) as engine:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, number)
        engine.send(Command("echo", "alive"))
        assert await anext(engine.events()) == [Event("alive")]


@pytest.mark.parametrize(("target", "unwinds"), [("echo", True), ("deaf", False)])
def test_the_engine_dies_with_its_killed_parent(target, unwinds, tmp_path):
    mark = tmp_path / "unwound"
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.engine.orphan_parent", target, str(mark)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    assert_gone(pid, ORPHAN_GRACE_S + 60)
    assert mark.exists() == unwinds


def test_it_runs_on_uvloop_too():
    async def scenario():
        async with running(children.echo) as engine:
            engine.send(Command("echo", b"x" * 2**20))
            assert await anext(engine.events()) == [Event(b"x" * 2**20)]
            engine.send(Command("kill", signal.SIGKILL))
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                await collect(engine)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_messages_are_cut_apart_wherever_the_stream_is_cut():
    messages = [Command("a", 1), Command("b", b"x" * 1000), Event(None)]
    stream = b"".join(encode(message) for message in messages)
    for size in (1, 2, 3, 7, 1000, len(stream)):
        decoder = Decoder()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [message for piece in pieces for message in decoder.feed(piece)] == messages
