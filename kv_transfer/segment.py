"""A file in shared memory that holds one KV pool and its fence table. Knows no torch.

    offset 0       header: what the pool is and whose, so that a reader never trusts a name alone
    offset 4096    fence table: one 64-bit word for each lease slot
    page-aligned   the blocks, num_blocks * block_bytes

The owner holds an exclusive `flock` on the file as long as it lives. The kernel drops the lock however the owner dies,
so a segment whose lock is free is garbage, and anybody may unlink it. No process id is stored: ids are reused, and
mean nothing in another container.

Loads and stores of fence words are single 8-byte moves. That they are seen in program order with the copies around
them is what x86-64 guarantees; a machine with weaker ordering needs barriers in `store` and `fence`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from baton.core.errors import StartupError
from kv_transfer.descriptor import ShmHandle
from kv_transfer.errors import NoTransportError, PeerGoneError, PoolMismatchError

if TYPE_CHECKING:
    from typing import Self

    from baton.core.model import KVLayout
    from kv_transfer.descriptor import PeerKey

SHM_DIRECTORY = Path("/dev/shm")

_NAME = re.compile(r"baton-[0-9a-f]{32}")
_MAGIC = b"BATON-KV"
_VERSION = 1
_WORD_BYTES = 8
_HEADER_FORMAT = struct.Struct("<8sIIQQ32s32s")


class _Header(NamedTuple):
    """The first bytes of a segment. Two headers are equal when their pools are the same in every respect."""

    magic: bytes
    version: int
    num_slots: int
    num_blocks: int
    block_bytes: int
    layout_digest: bytes
    incarnation_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSpec:
    """What a segment is to hold, for whom."""

    layout: KVLayout
    num_blocks: int
    num_slots: int
    incarnation: str

    @property
    def blocks_offset(self) -> int:
        """Where the blocks begin, in bytes: after the header's page and the fence table, on a page of their own."""
        table_pages = -(-self.num_slots * _WORD_BYTES // mmap.PAGESIZE)
        return (1 + table_pages) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return self.blocks_offset + self.num_blocks * self.layout.block_bytes

    def header(self) -> _Header:
        """The header that says all this."""
        layout = self.layout
        shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.dtype)
        return _Header(
            magic=_MAGIC,
            version=_VERSION,
            num_slots=self.num_slots,
            num_blocks=self.num_blocks,
            block_bytes=layout.block_bytes,
            layout_digest=_digest(repr(shape)),
            incarnation_digest=_digest(self.incarnation),
        )


class Segment:
    """The owner's side. Lives as long as the process that writes the blocks; not thread-safe."""

    def __init__(self, path: Path, lock_fd: int, spec: SegmentSpec) -> None:
        self._path = path
        self._lock_fd = lock_fd
        mapping = _map(lock_fd, spec.num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        mapping[: _HEADER_FORMAT.size] = _HEADER_FORMAT.pack(*spec.header())
        self.handle = ShmHandle(segment=path.name, num_blocks=spec.num_blocks)
        self.num_slots = spec.num_slots
        self.blocks_offset = spec.blocks_offset
        self.blocks, self._words = _split(mapping, spec)

    @classmethod
    def create(cls, spec: SegmentSpec, directory: Path = SHM_DIRECTORY) -> Self:
        """Makes a segment readable by this user alone, all its memory allocated, all its words 0.

        StartupError when the memory is not there: allocating now is what spares a later write its SIGBUS.
        """
        path, fd = _create_locked(directory)
        try:
            os.posix_fallocate(fd, 0, spec.num_bytes)
            return cls(path, fd, spec)
        except BaseException as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise StartupError(_does_not_fit(spec, directory)) from error
            raise

    def reopen(self) -> int:
        """A descriptor for child processes that write blocks too. Not the owner's: it keeps no lock."""
        return os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def store(self, slot: int, word: int) -> None:
        """Sets a slot's fence word. Works on a closed segment too, where nobody new can see it."""
        self._words[slot] = word

    def close(self) -> None:
        """Clears all fence words, unlinks the file and drops the lock. Repeating it is harmless.

        The memory goes back when the last view of `blocks` and the last reader's mapping are gone.
        """
        if self._lock_fd < 0:
            return
        for slot in range(self.num_slots):
            self._words[slot] = 0
        self._path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


class SegmentView:
    """A reader's side: the segment mapped read-only. Outlives its owner; `close` is what gives the memory back."""

    def __init__(self, mapping: mmap.mmap, spec: SegmentSpec) -> None:
        self._mapping = mapping
        self.num_slots = spec.num_slots
        self.num_blocks = spec.num_blocks
        self.blocks, self._words = _split(mapping, spec)

    @classmethod
    def open(cls, peer: PeerKey, layout: KVLayout, handle: ShmHandle, directory: Path = SHM_DIRECTORY) -> Self:
        """Maps a source's segment, whole, so that no later read pays for page faults.

        PeerGoneError when the segment is gone, NoTransportError when it is not this user's to read, PoolMismatchError
        when it is not the pool of `peer` that `layout` and `handle` describe.
        """
        if not _NAME.fullmatch(handle.segment):
            raise PoolMismatchError(f"{handle.segment!r} is not a segment's name")
        try:
            fd = os.open(directory / handle.segment, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerGoneError(f"the segment of {peer} is gone") from error
        except PermissionError as error:
            raise NoTransportError(f"the segment of {peer} is another user's") from error
        try:
            spec = _read_spec(fd, peer, layout, handle)
            return cls(_map(fd, spec.num_bytes, mmap.PROT_READ), spec)
        finally:
            os.close(fd)

    def fence(self, slot: int) -> int:
        """A slot's fence word."""
        return self._words[slot]

    def close(self) -> None:
        """Unmaps. Whatever was made from `blocks` must be gone: BufferError otherwise. Not to be repeated."""
        self._words.release()
        self.blocks.release()
        self._mapping.close()


def reap_stale_segments(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Unlinks the segments whose owners are dead, and returns their names. Segments of other users are left alone.

    Readers that still have one mapped keep their mapping: the memory goes back when they close it.
    """
    return [path.name for path in sorted(directory.glob("baton-*")) if _NAME.fullmatch(path.name) and _reap(path)]


def _reap(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone already, or not ours to open
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # its owner lives, somebody else was quicker, or it is not ours to unlink
        return False
    finally:
        os.close(fd)
    return True


def _create_locked(directory: Path) -> tuple[Path, int]:
    """A new empty file under a name that nobody can guess, locked. Returns its path and descriptor."""
    while True:
        path = directory / f"baton-{secrets.token_hex(16)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Between creation and lock a reaper may have taken the file for a dead owner's.
        if os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)


def _read_spec(fd: int, peer: PeerKey, layout: KVLayout, handle: ShmHandle) -> SegmentSpec:
    """What the opened segment holds; PoolMismatchError unless that is what was promised."""
    head = os.pread(fd, _HEADER_FORMAT.size, 0)
    if len(head) != _HEADER_FORMAT.size:
        raise PoolMismatchError(f"the segment of {peer} has no header")
    found = _Header(*_HEADER_FORMAT.unpack(head))
    spec = SegmentSpec(
        layout=layout,
        num_blocks=handle.num_blocks,
        num_slots=found.num_slots,
        incarnation=peer.incarnation,
    )
    for name, expected, value in zip(_Header._fields, spec.header(), found, strict=True):
        if value != expected:
            raise PoolMismatchError(f"the segment of {peer} has another {name.replace('_', ' ')}")
    if os.fstat(fd).st_size < spec.num_bytes:
        raise PoolMismatchError(f"the segment of {peer} is shorter than its blocks")
    return spec


def _map(fd: int, num_bytes: int, protection: int) -> mmap.mmap:
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)


def _split(mapping: mmap.mmap, spec: SegmentSpec) -> tuple[memoryview, memoryview]:
    """The blocks as bytes, and the fence table as 64-bit words."""
    whole = memoryview(mapping)
    table = whole[mmap.PAGESIZE : mmap.PAGESIZE + spec.num_slots * _WORD_BYTES]
    return whole[spec.blocks_offset : spec.num_bytes], table.cast("Q")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _does_not_fit(spec: SegmentSpec, directory: Path) -> str:
    free_bytes = 0
    with contextlib.suppress(OSError):
        usage = os.statvfs(directory)
        free_bytes = usage.f_bavail * usage.f_frsize
    return (
        f"the KV pool of {spec.num_bytes / 2**20:.0f} MiB does not fit in {directory} "
        f"({free_bytes / 2**20:.0f} MiB free): lower engine.kv_cache_bytes or enlarge {directory}"
    )
