"""Background work that outlives the cancellation of who asked for it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from baton.coordination.refusals import shutting_down
from baton.core.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

T = TypeVar("T")


class OwnedTasks:
    """A task group that is open for as long as the queue runs."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        """Whether work can be started."""
        return self._group is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Opens the group for the block; all its work ends with it."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                yield group
        finally:
            self._group = None

    def start(self, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work` in the background; False when the group is not open any more."""
        try:
            if self._group is not None:
                self._group.create_task(work)
                return True
        except RuntimeError:  # the group is being cancelled
            pass
        work.close()
        return False

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end, even when the caller is cancelled meanwhile: that takes effect after the end.

        Raises the ServingError of `work`, and UnavailableError when the group is not open.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda future: future.exception())  # a cancelled caller does not ask for it

        async def carry() -> None:
            try:
                result = await work
            except ServingError as error:
                done.set_exception(error)
            except BaseException:
                done.set_exception(shutting_down())
                raise
            else:
                done.set_result(result)

        if not self.start(carry()):
            work.close()
            raise shutting_down()
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait({done})  # bounded by the call's timeout; a second cancellation ends it
            raise
