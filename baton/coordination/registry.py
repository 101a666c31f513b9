"""Which workers there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.coordination.commands import Commands
from baton.coordination.wire import decode_views, encode_record
from baton.core.errors import AlreadyExistsError, FailedPreconditionError

if TYPE_CHECKING:
    from baton.coordination.client import RedisConnection
    from baton.coordination.keys import Keys
    from baton.core.workers import WorkerRecord, WorkerView


class WorkerRegistry:
    """The list of workers that are alive: each stays in it by its heartbeats, one every 0.5 to 1 s."""

    def __init__(self, connection: RedisConnection, keys: Keys) -> None:
        self._commands = Commands(connection, keys)
        self._channel = keys.wake_channel

    async def heartbeat(self, record: WorkerRecord) -> None:
        """Writes the worker's record; without the next one within 2.5 s the worker is out.

        A new incarnation takes the place of a dead one and frees what grants held on it; of a live one only at its
        own address. Raises UnavailableError when Redis is away (go on with the next heartbeat), AlreadyExistsError
        with reason WORKER_ID_TAKEN while another worker is alive under this id, and FailedPreconditionError with
        reason WORKER_REPLACED when a newer process took this worker's id or it was deregistered (stop: this process
        gets no more requests).
        """
        reply = await self._commands.call(
            "heartbeat", record.worker_id, record.incarnation, encode_record(record), self._channel
        )
        metadata = {"worker_id": record.worker_id, "incarnation": record.incarnation}
        if isinstance(reply, str):
            raise AlreadyExistsError(
                f"{record.worker_id} is the id of a live worker at {reply}", reason="WORKER_ID_TAKEN", metadata=metadata
            )
        if not reply:
            raise FailedPreconditionError(
                f"worker {record.worker_id} was deregistered, or another process has taken its id",
                reason="WORKER_REPLACED",
                metadata=metadata,
            )

    async def deregister(self, worker_id: str, incarnation: str) -> None:
        """Takes the worker out at once; this incarnation cannot come back. What it still runs keeps its credit.

        Raises UnavailableError when Redis is away: the missing heartbeats then do the same.
        """
        await self._commands.call("deregister", worker_id, incarnation)

    async def workers(self) -> tuple[WorkerView, ...]:
        """All workers with a fresh heartbeat, in the order of their ids. UnavailableError when Redis is away."""
        return decode_views(await self._commands.call("workers"))
