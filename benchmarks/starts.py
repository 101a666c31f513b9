"""How long the whole system takes from its start until it is ready: the first time on a machine, and again.

The first start compiles the kernels, since it finds an empty cache folder; the second finds what the first left.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks.report import Figure
from benchmarks.systems.baton import running_baton
from benchmarks.systems.system import CannotRunError, log_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECOND_START_LIMIT_S = 15.0
WORKER = "decode_worker"
PHASE = re.compile(r"start-up: .*\((?P<phase>.+) took (?P<seconds>[0-9.]+) s\)")


def start_figures(model: Path) -> list[Figure]:
    """Seconds until the system is ready, cold and again, and of each phase of the decode worker's engine. Blocks."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as cache:
        settings = {"XDG_CACHE_HOME": cache}
        for name, limit_s in (("start_cold", None), ("start_again", SECOND_START_LIMIT_S)):
            try:
                took_s = asyncio.run(_start(name, model, settings))
            except CannotRunError as error:
                figures.append(Figure(name=name, value=None, unit="s", n=0, note=str(error)))
                continue
            note = f"gateway and both workers at once; {_phases(log_file(name))}"
            goal = None if limit_s is None else 1.0
            figures.append(
                Figure(name=name, value=took_s, unit="s", n=1, limit=limit_s, goal_limit_ratio=goal, note=note)
            )
    return figures


async def _start(name: str, model: Path, settings: Mapping[str, str]) -> float:
    begun_s = time.monotonic()
    async with running_baton(name, model, settings):
        return time.monotonic() - begun_s


def _phases(log: Path) -> str:
    """The decode worker's phases, from the lines that `baton up` shows of it."""
    phases = [
        f"{match['phase']} {match['seconds']} s"
        for line in log.read_text(errors="replace").splitlines()
        if (match := PHASE.search(line)) and line.startswith(WORKER)
    ]
    return f"{WORKER}: {', '.join(phases)}"
