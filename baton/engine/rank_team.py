"""The other ranks of a group, as rank 0 sees them: child processes that are told the same and answer one by one."""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from baton.core.errors import EngineFaultError, StartupError
from baton.engine.channel import Begin, Decoder, Events, Failed, Ready, Stop, encode
from baton.engine.rank_process import Outcome, RankSpec, run_rank
from baton.engine.spawn import how_it_ended, spawn, start_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.rank_process import Order

START_S = 600.0
_EXIT_S = 2.0
_LAST_WORDS_S = 1.0
_READ_BYTES = 64 * 1024


class RankTeam:
    """Made by `start`, ended by `close`. Used from one thread, the one that started it: the ranks end with that."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self._ranks = ranks

    @classmethod
    def start(cls, specs: Sequence[RankSpec], inherited: Sequence[int]) -> RankTeam:
        """Starts a process for each spec; they load at the same time. StartupError, with no process left."""
        ranks: list[_Rank] = []
        try:
            ranks.extend(_Rank(spec, inherited) for spec in specs)
        except StartupError:
            cls(ranks).close()
            raise
        return cls(ranks)

    @property
    def pidfds(self) -> list[int]:
        """Readable each when its rank has ended."""
        return [rank.pidfd for rank in self._ranks]

    def wait_ready(self) -> None:
        """Blocks until all have loaded their part. StartupError, in one line, when one can't."""
        deadline_s = time.monotonic() + START_S
        for rank in self._ranks:
            rank.wait_ready(deadline_s)

    def send(self, order: Order) -> None:
        """Tells all ranks. EngineFaultError when one is no more, or reads nothing."""
        data = encode(order)
        for rank in self._ranks:
            rank.send(data)

    def answers(self) -> list[Outcome]:
        """What became of the last order, by each rank. EngineFaultError when one is no more, or says nothing."""
        return [rank.answer() for rank in self._ranks]

    def check(self) -> None:
        """Raises EngineFaultError when a rank is no more."""
        for rank in self._ranks:
            rank.check()

    def close(self) -> None:
        """Ends all ranks, by force those that do not end by themselves in time. Repeating it is harmless."""
        for rank in self._ranks:
            rank.stop()
        deadline_s = time.monotonic() + _EXIT_S
        for rank in self._ranks:
            rank.reap(deadline_s)


class _Rank:
    """One child and the socket to it."""

    def __init__(self, spec: RankSpec, inherited: Sequence[int]) -> None:
        self._name = spec.name
        self._timeout_s = spec.group.timeout_s
        self._child, self._socket = spawn(spec.name, (spec.group.name, f"rank-{spec.shard.rank}"), inherited)
        self.pidfd = os.pidfd_open(self._child.pid)
        self._decoder = Decoder()
        self._messages: deque[Any] = deque()
        self._is_closed = False
        self._socket.settimeout(self._timeout_s)
        with suppress(ConnectionError):  # its end is seen when an answer is waited for
            self._socket.sendall(encode(Begin(run_rank, spec)))

    def wait_ready(self, deadline_s: float) -> None:
        match self._receive(deadline_s):
            case Ready():
                return
            case Failed(line):
                raise StartupError(f"{self._name}: {line}")
            case None:
                raise StartupError(f"{self._name}: the process was not ready within {START_S:g} s")
            case _:
                raise StartupError(start_failure(self._name, self._exit_code()))

    def send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.sendall(data)
        except TimeoutError:
            raise self._lost("takes no orders") from None
        except ConnectionError:
            raise self._lost(how_it_ended(self._exit_code())) from None

    def answer(self) -> Outcome:
        match self._receive(time.monotonic() + self._timeout_s):
            case Events(batch):
                (outcome,) = batch
                assert isinstance(outcome, Outcome)
                return outcome
            case None:
                raise self._lost(f"has not answered for {self._timeout_s:g} s")
            case _:
                raise self._lost(how_it_ended(self._exit_code()))

    def check(self) -> None:
        if self._child.poll() is not None:
            raise self._lost(how_it_ended(self._child.returncode))

    def stop(self) -> None:
        if not self._is_closed:
            with suppress(OSError):
                self._socket.settimeout(0)
                self._socket.send(encode(Stop()))
            self._socket.close()

    def reap(self, deadline_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wait(deadline_s - time.monotonic())
        os.close(self.pidfd)

    def _receive(self, deadline_s: float) -> Any:
        """The next message; None when the time is up, False at the end of the stream."""
        while not self._messages:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            except ConnectionError:
                data = b""
            if not data:
                return False
            self._messages.extend(self._decoder.feed(data))
        return self._messages.popleft()

    def _exit_code(self) -> int:
        """Of a process whose end of the socket is closed: its last words are said."""
        self._wait(_LAST_WORDS_S)
        return self._child.returncode

    def _wait(self, timeout_s: float) -> None:
        try:
            self._child.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _lost(self, how: str) -> EngineFaultError:
        return EngineFaultError(f"{self._name} {how}")
