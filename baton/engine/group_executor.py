"""The executor of a tensor-parallel worker: rank 0 of a group of processes that compute each step together.

Scheduling, leases and sampling stay with rank 0. It tells the other ranks each step's plan, computes its own part, and
has the logits of all. On a CPU all ranks have the same KV pool mapped, and each reads and writes its own heads in every
block: whoever reads a block sees all of it, whatever the number of ranks. On CUDA each has a pool of its own heads, and
they have the host copy of all these pools mapped.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.core.errors import EngineFaultError, InternalError, OutOfMemoryError, ServingError
from baton.engine.batch import BatchPlan, SequenceSlice, StepOutput
from baton.engine.cores import CoreShare
from baton.engine.host_copy import HostCopy
from baton.engine.host_memory import SharedMemory
from baton.engine.kv_pool import KVPool
from baton.engine.rank_group import GroupBrokenError
from baton.engine.rank_process import GroupSpec, Join, Move, RankSpec, Step
from baton.engine.rank_team import RankTeam
from baton.engine.threads import use_threads
from baton.engine.torch_executor import TorchExecutor, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core.model import KVLayout
    from baton.engine.block_moves import Way
    from baton.engine.rank_group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank has of its own. `blocks` moves its heads of each block, where it has a pool and a host copy."""

    group: RankGroup
    executor: TorchExecutor
    blocks: HostCopy | None

    def move(self, way: Way, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """See `BlockMover.move`."""
        assert self.blocks is not None, "ranks without a host copy"
        self.blocks.move(way, source_ids, target_ids)


class GroupExecutor:
    """Implements `Executor` with a group of ranks, this process the first of them. Made by `start`, ended by `close`.

    Ranks that have a host copy make it a `BlockMover` too.

    A step that fails on any rank fails on all; the group is then joined anew, and the next step can succeed. A rank
    that is gone, or does not answer, is the end of the engine.
    """

    def __init__(self, layout: KVLayout, own: Rank, team: RankTeam) -> None:
        self.layout = layout
        self.num_blocks = own.executor.num_blocks
        self.vocab_size = own.executor.vocab_size
        self.attention = own.executor.attention
        self.max_context_tokens = own.executor.max_context_tokens
        self.pidfds = team.pidfds
        self._rank = own
        self._team = team
        self._started = ExitStack()
        self._epoch = 0

    @classmethod
    def start(cls, spec: GroupSpec, pool: KVPool | None = None) -> GroupExecutor:
        """Starts the other ranks, loads this one's part meanwhile, and connects them. `pool` lies over `spec.memory`.

        Blocks for the load. Ranks live no longer than the thread that calls this. Sets the threads of this process.
        StartupError, in one line and with no process left, when a rank cannot start.
        """
        with ExitStack() as started:
            meeting = SharedMemory.create(spec.hardware.meeting_bytes(spec.size))
            started.callback(meeting.close)
            ranks = [RankSpec(group=spec, shard=shard, meeting_fd=meeting.fd) for shard in spec.shards]
            inherited = [meeting.fd] if spec.memory is None else [meeting.fd, spec.memory.fd]
            team = RankTeam.start(ranks[1:], inherited)
            started.callback(team.close)
            own = open_rank(ranks[0], pool, team.check)
            team.wait_ready()
            executor = cls(spec.layout, own, team)
            executor._join()
            executor._started = started.pop_all()
        return executor

    def execute(self, plan: BatchPlan, pause: Callable[[], None] | None = None) -> StepOutput:
        """Runs the step; see `Executor.execute`. Never pauses: all ranks would have to agree on it at each layer."""
        plan.assert_fits(block_size=self.layout.block_size, num_blocks=self.num_blocks)
        if not plan.slices:
            return StepOutput(tokens=())
        self._team.send(Step(_bare(plan)))
        output: StepOutput | None = None
        errors: list[Exception] = []
        try:
            output = self._rank.executor.execute(plan)
        except GroupBrokenError:
            self._rank.group.leave()
        except Exception as error:
            self._rank.group.leave()
            errors.append(error)
        outcomes = self._team.answers()
        if output is not None and all(outcome.is_done for outcome in outcomes):
            return output
        errors += [outcome.error for outcome in outcomes if outcome.error is not None]
        self._join()
        raise _most_telling(errors)

    def move(self, way: Way, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """See `BlockMover.move`. One that fails on any rank has failed; the group lives on."""
        if not source_ids:
            return
        sources, targets = array("i", source_ids), array("i", target_ids)
        self._team.send(Move(way, sources, targets))
        errors: list[Exception] = []
        try:
            self._rank.move(way, sources, targets)
        except Exception as error:
            errors.append(error)
        errors += [outcome.error for outcome in self._team.answers() if outcome.error is not None]
        if errors:
            raise _most_telling(errors)

    def rest(self) -> None:
        """See `Executor.rest`. The other ranks see by themselves that nothing comes."""
        self._rank.executor.rest()

    def check(self) -> None:
        """See `Executor.check`."""
        self._team.check()

    def warm_up(self) -> None:
        """See `Executor.warm_up`."""
        warm_up(self)

    def close(self) -> None:
        """Ends the other ranks; at once those that hang. Repeating it is harmless."""
        self._rank.group.leave()
        self._started.close()

    def _join(self) -> None:
        """Connects the ranks under a new epoch."""
        self._epoch += 1
        self._team.send(Join(self._epoch))
        try:
            self._rank.group.join(self._epoch)
        except GroupBrokenError as error:
            self._team.check()
            raise EngineFaultError(f"the ranks cannot connect: {error}") from error
        if not all(outcome.is_done for outcome in self._team.answers()):
            raise EngineFaultError("the ranks cannot connect")


def open_rank(spec: RankSpec, pool: KVPool | None = None, check: Callable[[], None] | None = None) -> Rank:
    """One rank, its end of the group not joined yet, and its part of the model. Blocks for the load. StartupError.

    `pool` lies over the group's memory where this process has it mapped already; `check` may raise while other ranks
    are waited for.
    """
    whole, shard = spec.group, spec.shard
    use_threads(whole.num_threads)
    group = whole.hardware.open_group(shard, spec.meeting_fd, timeout_s=whole.timeout_s, check=check)
    has_own_pool = whole.hardware.has_own_pools
    if pool is None and whole.memory is not None:
        num_blocks = whole.num_host_blocks if has_own_pool else whole.num_blocks
        pool = KVPool(whole.layout, num_blocks, storage=whole.memory.map())
    part, blocks = None if pool is None else pool.part(shard), None
    if has_own_pool or part is None:
        heads = shard.cut(whole.layout.num_kv_heads).count
        own = KVPool(replace(whole.layout, num_kv_heads=heads), whole.num_blocks, device=spec.device)
        blocks = None if part is None else HostCopy(own, part)
        part = own
    executor = TorchExecutor.from_folder(
        whole.folder,
        pool=part,
        quantization=whole.quantization,
        group=group,
        cores=CoreShare.of_this_host(whole.num_threads) if spec.device == "cpu" else None,
    )
    return Rank(group=group, executor=executor, blocks=blocks)


def _bare(plan: BatchPlan) -> BatchPlan:
    """What the other ranks need of a plan, quick to pickle."""
    return BatchPlan(slices=[_bare_slice(piece) for piece in plan.slices])


def _bare_slice(piece: SequenceSlice) -> SequenceSlice:
    return replace(
        piece,
        attempt_id="",
        token_ids=array("i", piece.token_ids),
        block_table=array("i", piece.block_table),
        rules=None,
        top_logprobs=None,
    )


def _most_telling(errors: list[Exception]) -> Exception:
    """What the step is said to have failed by, where several ranks have a say."""
    for error in errors:
        if isinstance(error, OutOfMemoryError):
            return error
    known = [error for error in errors if isinstance(error, ServingError)]
    return next(iter(known or errors), InternalError("the ranks lost each other in a step"))
