"""One child process: a process group of its own, its output line by line, and no survivors of its group."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from baton.core import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MAX_LINE_BYTES = 8192
# How long the rest of a group may go on after its first process ended: helpers that tidy up after it.
GROUP_GRACE_S = 1.0
PIPES_GRACE_S = 1.0
KILLED_WAIT_S = 5.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExit:
    """How a child ended. `code` is negative for a signal; `last_error_line` is empty when it wrote none."""

    code: int
    last_error_line: str

    @property
    def reason(self) -> str:
        """One line for people."""
        if self.code < 0:
            try:
                how = f"killed by {signal.Signals(-self.code).name}"
            except ValueError:
                how = f"killed by signal {-self.code}"
            return how
        return self.last_error_line or f"ended with exit code {self.code}"


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, so that it can wait for their end."""
    launch.prctl(launch.PR_SET_CHILD_SUBREAPER, 1)


class Child:
    """A child process and whatever it starts in its process group.

    It gets SIGTERM when this process dies. Its output arrives at `on_line(line)`; standard input is empty.
    """

    def __init__(self, argv: Sequence[str], on_line: Callable[[str], None], *, address: str) -> None:
        """Starts `argv`, whose first word is a path; `address` is where it will listen. OSError: no process."""
        self.address = address
        self._on_line = on_line
        self._last_error_line = ""
        self._process = subprocess.Popen(
            launch.bound_to_this_process(argv, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self.pid = self._process.pid

    def terminate(self) -> None:
        """Asks the child to drain and end; nothing happens when it has ended."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the child at once; nothing happens when it has ended."""
        self._signal(signal.SIGKILL)

    async def wait(self) -> ChildExit:
        """Waits for the end of the child, then ends and reaps what is left of its group.

        To be awaited once. When cancelled it kills the group first, so no process outlives it either way.
        """
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None
        assert stderr is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                pumps = [
                    tasks.create_task(self._pump(stdout, is_error=False)),
                    tasks.create_task(self._pump(stderr, is_error=True)),
                ]
                await wait_for_death(self.pid)
                await self._group_ended()
                # They end by themselves unless a process left the group and kept the pipes.
                await asyncio.wait(pumps, timeout=PIPES_GRACE_S)
                for pump in pumps:
                    pump.cancel()
        finally:
            self._signal_group(signal.SIGKILL)
            await self._reap()
        assert self._process.returncode is not None
        return ChildExit(code=self._process.returncode, last_error_line=self._last_error_line)

    async def _group_ended(self) -> None:
        """Lets the rest of the group end by itself for a moment, then kills it: only then do the pipes close."""
        for _ in range(round(GROUP_GRACE_S / POLL_S)):
            if not any(_living_members(self.pid)):
                break
            await asyncio.sleep(POLL_S)
        self._signal_group(signal.SIGKILL)

    async def _pump(self, pipe: IO[bytes], *, is_error: bool) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        rest = b""
        try:
            while data := await reader.read(65536):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._take(line, is_error)
            if rest:
                self._take(rest, is_error)
        finally:
            transport.close()

    def _take(self, line: bytes, is_error: bool) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        if is_error:
            self._last_error_line = text
        self._on_line(text)

    async def _reap(self) -> None:
        """Takes the exit codes of the whole group. Everything in it has been killed, so this takes moments."""
        for _ in range(round(KILLED_WAIT_S / POLL_S)):
            if self._reap_dead():
                return
            await asyncio.sleep(POLL_S)

    def _reap_dead(self) -> bool:
        """Takes the exit codes that are there; True when no process of the group is left to wait for."""
        try:
            while (found := os.waitpid(-self.pid, os.WNOHANG))[0]:
                if found[0] == self.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return True
        return False

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            os.kill(self.pid, number)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            os.killpg(self.pid, number)


async def wait_for_death(pid: int) -> None:
    """Returns when the child process `pid` is dead. Does not reap it: until somebody does, nobody gets its id."""
    loop, dead = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    try:
        loop.add_reader(descriptor, dead.set)
        await dead.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _living_members(group: int) -> Iterator[int]:
    """Process ids of `group` that still run, without zombies."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_bytes()
        except OSError:  # it ended while we looked
            continue
        state, _, process_group = stat[stat.rindex(b")") + 2 :].split(maxsplit=3)[:3]
        if int(process_group) == group and state not in (b"Z", b"X"):
            yield int(entry.name)
