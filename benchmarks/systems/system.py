"""A running system that can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.load import Client


OUT = Path("benchmarks/out")


def log_file(name: str) -> Path:
    """Where a system's own output goes."""
    OUT.mkdir(parents=True, exist_ok=True)
    return OUT / f"{name.replace(' ', '-')}.log"


class CannotRunError(Exception):
    """The system does not run on this machine; the message is its own reason, for the table and the JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A system that is ready. `configuration` is everything that was chosen for it."""

    name: str
    client: Client
    configuration: dict[str, Any]
