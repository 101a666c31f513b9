"""KV blocks on their way between a pool in device memory and its copy in host memory.

The copy has whole blocks: all heads, whatever part of them the pool has. So what other workers read, and what they have
read is put into, looks the same for any number of ranks. Blocks go through pinned buffers of a few MiB (`Staging`), on
the engine's own stream: whoever moves them waits for it anyhow, and a step behind a move finds what it has brought.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import OutOfMemoryError
from baton.engine.block_moves import Way
from baton.engine.block_runs import CopyRun, copy_runs
from baton.engine.out_of_memory import is_out_of_memory
from baton.engine.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from baton.core.model import KVLayout
    from baton.engine.batch import BatchPlan, StepOutput
    from baton.engine.block_moves import BlockMover
    from baton.engine.executor import Executor
    from baton.engine.kv_pool import KVPool
    from baton.engine.staging import Mark

_PIECE_BYTES = 8 << 20
# While one piece is put in its place the next is on its way. Fewer than `Staging` has buffers.
_NUM_UNDER_WAY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """Where a worker's blocks are.

    `pool` is what it computes in; None where each of several ranks has one of its own heads on its own device. `host`
    is the copy in host memory, if there is one: whole blocks, those of the pool under their ids and perhaps some more.
    """

    pool: KVPool | None
    host: KVPool | None = None

    @property
    def outer(self) -> KVPool:
        """What other workers' readers see, or a reader here fills: whole blocks."""
        whole = self.host or self.pool
        assert whole is not None, "a worker without memory"
        return whole


class HostCopy:
    """A `BlockMover` of one pool. `host` has the same heads of each block, and may be a part of wider blocks."""

    def __init__(self, pool: KVPool, host: KVPool) -> None:
        assert pool.layout == host.layout, "the same blocks"
        self._pool = pool
        self._host = host.tensor
        self._staging = Staging(pool.device)
        self._piece_blocks = max(1, _PIECE_BYTES // pool.layout.block_bytes)

    def move(self, way: Way, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """See `BlockMover.move`."""
        try:
            match way:
                case Way.OUT:
                    self._store(source_ids, target_ids)
                case Way.BACK:
                    self._load(source_ids, target_ids)
                case Way.WITHIN:
                    self._pool.copy_blocks(source_ids, target_ids)
            return
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        raise OutOfMemoryError("a copy of KV blocks does not fit into memory", retry_after_s=1.0)

    def _store(self, block_ids: Sequence[int], host_ids: Sequence[int]) -> None:
        under_way: deque[tuple[torch.Tensor, Mark, torch.Tensor]] = deque()
        for run in self._pieces(block_ids, host_ids):
            fetched, mark = self._staging.begin_download(_of(self._pool.tensor, run.source, run.length))
            under_way.append((fetched, mark, _of(self._host, run.destination, run.length)))
            if len(under_way) == _NUM_UNDER_WAY:
                _put(*under_way.popleft())
        while under_way:
            _put(*under_way.popleft())

    def _load(self, host_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        for run in self._pieces(host_ids, block_ids):
            self._staging.upload(
                _of(self._host, run.source, run.length), into=_of(self._pool.tensor, run.destination, run.length)
            )

    def _pieces(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> Iterator[CopyRun]:
        for source, target, length in copy_runs(source_ids, target_ids):
            for first in range(0, length, self._piece_blocks):
                yield CopyRun(source + first, target + first, min(self._piece_blocks, length - first))


class MirrorExecutor:
    """An `Executor` whose steps end when the blocks that they have completed are in the host copy, under the same ids.

    So whatever is told of a step can be read there. A copy that fails is a step that fails.
    """

    def __init__(self, executor: Executor, blocks: BlockMover) -> None:
        self._executor = executor
        self._blocks = blocks
        self.layout: KVLayout = executor.layout
        self.num_blocks = executor.num_blocks
        self.vocab_size = executor.vocab_size
        self.attention = executor.attention
        self.max_context_tokens = executor.max_context_tokens

    def execute(self, plan: BatchPlan, pause: Callable[[], None] | None = None) -> StepOutput:
        """See `Executor.execute`."""
        output = self._executor.execute(plan, pause)
        block_ids = completed_blocks(plan, self.layout.block_size)
        self._blocks.move(Way.OUT, block_ids, block_ids)
        return output

    def rest(self) -> None:
        """See `Executor.rest`."""
        self._executor.rest()

    def check(self) -> None:
        """See `Executor.check`."""
        self._executor.check()

    def warm_up(self) -> None:
        """See `Executor.warm_up`."""
        self._executor.warm_up()


def completed_blocks(plan: BatchPlan, block_size: int) -> list[int]:
    """The blocks that a step writes to and that may be read after it, each once: the full ones, and a prompt's last."""
    block_ids: set[int] = set()
    for piece in plan.slices:
        first, end = piece.start_position // block_size, piece.end_position // block_size
        if piece.sampling is not None:
            end = -(-piece.end_position // block_size)
        block_ids.update(piece.block_table[first:end])
    return sorted(block_ids)


def _of(tensor: torch.Tensor, first: int, length: int) -> torch.Tensor:
    return tensor[first : first + length]


def _put(fetched: torch.Tensor, mark: Mark, target: torch.Tensor) -> None:
    mark.synchronize()
    target.copy_(fetched)
