"""How the engines of a host divide its cores: by who computes at the moment.

A prefill engine and a decode engine are rarely busy for the same share of the time. With a fixed half of the cores
each, a lone prompt leaves half of them idle; with all of them each, both wait for threads that the other one has
preempted. So each engine says in a few bytes of shared memory that it computes, and takes for each part of a step
its share among those that do.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.cgroup import usable_cores
from baton.core.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_ENGINES = 128
_WORD_BYTES = 8
# struct flock: type, whence, start, length, and a process id that is not used here.
_FLOCK = "hhqqi4x"
# An engine that has said nothing for so long was killed in the middle of a step, or its step is a very long one.
STALE_S = 10.0


class CoreShare:
    """One engine's part of the cores, in threads. Calls take microseconds and never block; used from one thread.

    The word of each engine in the file is the time at which it last took its share, on the host's monotonic clock in
    nanoseconds, and 0 when it rests. A lock on the word, which ends with the process however that ends, says that it
    is taken.
    """

    def __init__(self, most: int, *, num_cores: int, path: Path, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`most`: threads that this engine never exceeds. `path`: the same file for all engines on these cores."""
        self._most = most
        self._num_cores = num_cores
        self._now_ns = now_ns
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.ftruncate(self._fd, _MAX_ENGINES * _WORD_BYTES)
            self._words = memoryview(mmap.mmap(self._fd, _MAX_ENGINES * _WORD_BYTES)).cast("Q")
        except OSError as error:
            raise StartupError(f"{path}: {error.strerror}: engines divide the cores through this file") from error
        self._own = self._claim(path)

    @classmethod
    def of_this_host(cls, most: int) -> CoreShare:
        """The share among this user's engines that see the same /dev/shm. Raises StartupError."""
        return cls(most, num_cores=usable_cores(), path=Path(f"/dev/shm/baton-cores-{os.getuid()}"))

    def take(self) -> int:
        """Says that this engine computes; the number of threads that it may use for the next moments, at least 1."""
        now_ns = self._now_ns()
        self._words[self._own] = now_ns
        oldest_ns = now_ns - int(STALE_S * 1e9)
        num_busy = sum(word > oldest_ns for word in self._words if word)
        return max(1, min(self._most, self._num_cores // num_busy))

    def rest(self) -> None:
        """Says that this engine does not compute."""
        self._words[self._own] = 0

    def close(self) -> None:
        """Gives the place up."""
        self.rest()
        os.close(self._fd)

    def _claim(self, path: Path) -> int:
        for index in range(_MAX_ENGINES):
            lock = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, index * _WORD_BYTES, _WORD_BYTES, 0)
            with suppress(BlockingIOError):
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)
                self._words[index] = 0
                return index
        os.close(self._fd)
        raise StartupError(f"{path}: {_MAX_ENGINES} engines run on this host already")
