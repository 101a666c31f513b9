"""Follows the workers: health that tells the truth, a word on each misfit, no channels to the dead."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.coordination.queue import AdmissionQueue
    from baton.core.workers import WorkerView
    from baton.rpc.channels import ChannelPool
    from baton.rpc.server import ServingServer
    from gateway.routing import Router

_log = logging.getLogger(__name__)


class Fleet:
    """The gateway serves when Redis answers and some pair of workers fits together."""

    def __init__(self, queue: AdmissionQueue, router: Router, channels: ChannelPool, server: ServingServer) -> None:
        self._queue = queue
        self._router = router
        self._channels = channels
        self._server = server
        self._is_serving = False
        self._misfits: set[tuple[str, str]] = set()
        self._addresses: set[str] = set()

    async def follow(self, *, interval_s: float, call_grace_s: float) -> None:
        """Looks every `interval_s` until cancelled. Calls to a worker that is gone get `call_grace_s` to end."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for address in self._look():
                    tasks.create_task(self._channels.forget(address, call_grace_s))
                await asyncio.sleep(interval_s)

    def _look(self) -> set[str]:
        """Takes note of the workers now; returns the addresses that nobody has any more."""
        is_available, views = self._queue.is_available, self._queue.views
        self._set_serving(is_available and self._router.has_pair(views))
        if not is_available:
            return set()  # nothing is known of the workers, which does not mean that they are gone
        self._tell_misfits(views)
        addresses = {view.record.address for view in views}
        gone, self._addresses = self._addresses - addresses, addresses
        return gone

    def _set_serving(self, is_serving: bool) -> None:
        if is_serving != self._is_serving:
            _log.info("serving" if is_serving else "not serving: no Redis, or no pair of workers that fit")
        self._is_serving = is_serving
        self._server.set_serving(is_serving)

    def _tell_misfits(self, views: Sequence[WorkerView]) -> None:
        """Logs each worker of another model or tokenizer once in its life. It stays visible in GetStatus."""
        misfits = {
            (view.record.worker_id, view.record.incarnation): view.record
            for view in views
            if not self._router.fits(view.record)
        }
        for key in misfits.keys() - self._misfits:
            theirs = misfits[key].fingerprint
            _log.warning(
                "a worker runs another model or tokenizer and gets no requests",
                extra={
                    "worker_id": key[0],
                    "model": theirs.model,
                    "weights": theirs.weights,
                    "tokenizer": theirs.tokenizer,
                },
            )
        self._misfits = set(misfits)
