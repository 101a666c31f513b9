"""A rank of a tensor-parallel group other than the first: a child process that computes what it is told to.

    rank 0 (the engine process)                              rank r
    RankTeam.send(Order) ──the same to each rank────────▶  obeys, in order
    RankTeam.answers() ◀──one Outcome for each message────  within a step the ranks talk through RankGroup

It holds nothing that somebody else reads under a name, so the kernel may end it at any moment, and does so when rank 0
ends.
"""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import InternalError, OutOfMemoryError, ServingError
from baton.core.launch import PR_SET_PDEATHSIG, prctl
from baton.engine.out_of_memory import is_out_of_memory
from baton.engine.rank_group import GroupBrokenError
from baton.engine.sharding import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan
    from baton.engine.block_moves import Way
    from baton.engine.channel import ChildChannel
    from baton.engine.group_executor import Rank
    from baton.engine.host_memory import SharedMemory
    from baton.engine.rank_hardware import RankHardware

_log = logging.getLogger(__name__)

# Between two steps of a busy engine less time passes: after more, the cores are other engines'.
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What all ranks of a group are told. `layout` is the whole model's.

    `memory` is the pool that they share; where the `hardware` gives each a pool of its own heads, it is the host copy
    of them all, of `num_host_blocks`, and None where there is none. `num_threads` are those of one rank. A rank that is
    `timeout_s` behind breaks the group, and one that is as late again with its answer is taken for lost. `set_up_log`
    is called in each child with what it is called, `name` and its rank.
    """

    size: int
    folder: Path
    layout: KVLayout
    num_blocks: int
    hardware: RankHardware
    memory: SharedMemory | None
    num_threads: int
    timeout_s: float
    num_host_blocks: int = 0
    quantization: str = "none"
    name: str = "engine"
    set_up_log: Callable[[str], None] | None = None

    @property
    def shards(self) -> list[Shard]:
        """What each rank has."""
        return [Shard(rank, self.size) for rank in range(self.size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What one rank is started with. `meeting_fd` is a file through which the ranks meet.

    That, and the group's memory, are descriptors that it has inherited.
    """

    group: GroupSpec
    shard: Shard
    meeting_fd: int

    @property
    def device(self) -> str:
        """Where it computes."""
        return self.group.hardware.device(self.shard.rank)

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"rank {self.shard.rank} of {self.shard.size}"


@dataclass(frozen=True, slots=True)
class Join:
    """Leave the group and join it under this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Step:
    """Compute your part of this. Its slices have no rules: nothing is sampled."""

    plan: BatchPlan


@dataclass(frozen=True, slots=True)
class Move:
    """Copy your heads of these blocks. Nothing in it is waited for by other ranks."""

    way: Way
    source_ids: Sequence[int]
    target_ids: Sequence[int]


Order = Join | Step | Move


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it went. `error` is None as well where the step only ended because another rank left."""

    is_done: bool
    error: ServingError | None = None


def run_rank(channel: ChildChannel[Order, Outcome], spec: RankSpec) -> None:
    """The process's whole life, up to the end of its parent or of the socket between them."""
    _die_with_parent()
    if spec.group.set_up_log is not None:
        spec.group.set_up_log(f"{spec.group.name}_rank_{spec.shard.rank}")
    from baton.engine.group_executor import open_rank

    rank = open_rank(spec)
    channel.ready()

    while not channel.is_stopping:
        orders = channel.poll_commands(_PAUSE_S)
        if not orders:
            rank.executor.rest()
            orders = channel.poll_commands(None)
        for order in orders:
            channel.emit([_obey(rank, order)])


def _obey(rank: Rank, order: Order) -> Outcome:
    try:
        match order:
            case Join(epoch):
                rank.group.join(epoch)
            case Step(plan):
                rank.executor.follow(plan)
            case Move(way, source_ids, target_ids):
                rank.move(way, source_ids, target_ids)
    except GroupBrokenError:
        rank.group.leave()
        return Outcome(is_done=False)
    except Exception as error:
        if not isinstance(order, Move):
            rank.group.leave()
        return Outcome(is_done=False, error=_told(error))
    return Outcome(is_done=True)


def _told(error: Exception) -> ServingError:
    """Without the frames of the step, and all that it had allocated, and without a text that may quote a request."""
    if isinstance(error, OutOfMemoryError):
        return OutOfMemoryError(error.message, retry_after_s=None)
    if isinstance(error, (MemoryError, RuntimeError)) and is_out_of_memory(error):
        return OutOfMemoryError("a step does not fit into the memory of a rank", retry_after_s=None)
    _log.error("a step failed", exc_info=error)
    return InternalError("the computation of a step failed")


def _die_with_parent() -> None:
    """By the kernel's hand, so that a rank that is frozen or hangs in a kernel ends too."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
