"""A rank of a tensor-parallel group other than the first: a child process that computes what it is told to.

    rank 0 (the engine process)                              rank r
    RankTeam.send(Join | Step) ──the same to each rank──▶  obeys, in order
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
from baton.engine.sharding import Shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan
    from baton.engine.channel import ChildChannel
    from baton.engine.host_memory import SharedMemory

_log = logging.getLogger(__name__)

# Between two steps of a busy engine less time passes: after more, the cores are other engines'.
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What all ranks of a group are told. `layout` is the whole model's.

    `memory` is the pool that they share; without it each makes one of its part, on a device of its own. `num_threads`
    are those of one rank. A rank that is `timeout_s` behind breaks the group, and one that is as late again with its
    answer is taken for lost. `set_up_log` is called in each child with what it is called, `name` and its rank.
    """

    size: int
    folder: Path
    layout: KVLayout
    num_blocks: int
    device: str
    memory: SharedMemory | None
    num_threads: int
    timeout_s: float
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
        """Where it computes: ranks on CUDA have the first devices, one each."""
        return "cpu" if self.group.device == "cpu" else f"cuda:{self.shard.rank}"

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
class Outcome:
    """How it went. `error` is None as well where the step only ended because another rank left."""

    is_done: bool
    error: ServingError | None = None


def run_rank(channel: ChildChannel[Join | Step, Outcome], spec: RankSpec) -> None:
    """The process's whole life, up to the end of its parent or of the socket between them."""
    _die_with_parent()
    if spec.group.set_up_log is not None:
        spec.group.set_up_log(f"{spec.group.name}_rank_{spec.shard.rank}")
    from baton.engine.group_executor import open_rank
    from baton.engine.rank_group import GroupBrokenError

    group, executor = open_rank(spec)
    channel.ready()

    def obey(message: Join | Step) -> Outcome:
        try:
            match message:
                case Join(epoch):
                    group.join(epoch)
                case Step(plan):
                    executor.follow(plan)
        except GroupBrokenError:
            group.leave()
            return Outcome(is_done=False)
        except Exception as error:
            group.leave()
            return Outcome(is_done=False, error=_told(error))
        return Outcome(is_done=True)

    while not channel.is_stopping:
        messages = channel.poll_commands(_PAUSE_S)
        if not messages:
            executor.rest()
            messages = channel.poll_commands(None)
        for message in messages:
            channel.emit([obey(message)])


def _told(error: Exception) -> ServingError:
    """Without the frames of the step, and all that it had allocated, and without a text that may quote a request."""
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
