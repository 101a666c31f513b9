"""`baton status`: queues, workers and occupancy now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from baton.cli.client import connect
from baton.v1.common_pb2 import WorkerRole, WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console

    from baton.v1.common_pb2 import WorkerStatus
    from baton.v1.gateway_pb2 import Model, QueueStatus

TIMEOUT_S = 5.0


async def show_status(address: str, console: Console) -> None:
    """Prints one gateway's view. ServingError when it does not answer in time."""
    async with connect(address) as client:
        model, status = await client.status(TIMEOUT_S)
    console.print(_describe(model), highlight=False, markup=False)
    console.print(f"{status.num_active} requests in this gateway", highlight=False)
    console.print(_queues(status.queues))
    console.print(_workers(status.workers) if status.workers else "no workers")


def _describe(model: Model) -> str:
    numerics = model.fingerprint.dtype or "no worker known"
    if model.fingerprint.quantization not in ("", "none"):
        numerics += f", {model.fingerprint.quantization} weights"
    return (
        f"{model.name} ({numerics}), {model.max_context_tokens} tokens of context, {model.vocab_size} in the vocabulary"
    )


def _queues(queues: Iterable[QueueStatus]) -> Table:
    table = _table("queue", "waiting", "tokens", "oldest")
    for queue in queues:
        table.add_row(
            queue.queue_class,
            f"{queue.num_waiting} of {queue.max_waiting}",
            f"{queue.waiting_tokens} of {queue.max_waiting_tokens}",
            f"{queue.oldest_wait_s:.1f} s",
        )
    return table


def _workers(workers: Iterable[WorkerStatus]) -> Table:
    table = _table("worker", "role", "state", "address", "computes on", "running", "waiting", "KV blocks", "heard from")
    for worker in workers:
        table.add_row(
            worker.worker_id,
            _word(WorkerRole.Name, worker.role, "WORKER_ROLE_"),
            _word(WorkerState.Name, worker.state, "WORKER_STATE_"),
            worker.address,
            f"{worker.device} ({worker.attention})" if worker.attention else "unknown",
            str(worker.num_running),
            str(worker.num_waiting),
            f"{worker.num_used_blocks} of {worker.num_blocks}",
            f"{worker.heartbeat_age_s:.1f} s ago",
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _word(name: Callable[[Any], str], value: int, prefix: str) -> str:
    """An enum value's name for people; a value that we do not know is said to be unknown."""
    try:
        return name(value).removeprefix(prefix).lower()
    except ValueError:
        return "unknown"
