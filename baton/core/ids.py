"""Names of hosts, process lives and attempts."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM_FOLDER = Path("/dev/shm")


def host_id() -> str:
    """Identity of the shared memory that this process sees: `<boot id>-<device number of /dev/shm>`.

    Two processes can map each other's segments exactly when this is equal: containers of one machine have
    separate mounts, and so separate device numbers, unless they share the mount. Where the system has no shared
    memory the answer is random, so that nobody takes it for their own. Reads two small files.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}-{os.stat(_SHM_FOLDER).st_dev}"
    except OSError:
        return f"none-{secrets.token_hex(8)}"


def new_incarnation() -> str:
    """Id of one life of a process: 16 hex digits, never repeated in practice."""
    return secrets.token_hex(8)


def new_attempt_id() -> str:
    """Id of one attempt at a request: 32 hex digits. A retry is another attempt."""
    return secrets.token_hex(16)


def new_request_id() -> str:
    """Id of a request whose client chose none: `req-` and 24 hex digits."""
    return f"req-{secrets.token_hex(12)}"
