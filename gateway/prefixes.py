"""Which prefill workers have computed which beginnings of prompts, as far as this gateway has seen.

No digest of a prompt leaves the processes that hold prompts: a ticket in Redis says how many of its tokens which
worker has, and so any gateway can route it, but not which tokens. A gateway that starts, or one that sees a prompt's
beginning for the first time, does not know yet; after its first request it does. A worker may have given a beginning up
since: what is said here is an expectation, and the worker's own look counts.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from baton.core.prefixes import PrefixDigests

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.core.workers import WorkerRecord, WorkerView

# Coarser than a worker's blocks: a millisecond for a prompt of 32,768 tokens.
STRIDE = 64
_MAX_NAMES = 50_000
# Workers that are remembered for one beginning, and told of in one ticket.
_MAX_WORKERS = 8


class KnownPrefixes:
    """Remembers, for the beginnings that were used last, the lives of workers that have them. Takes bounded memory.

    `shares`: whether tenants find each other's beginnings in the workers' caches.
    """

    def __init__(self, *, shares: bool, max_names: int = _MAX_NAMES) -> None:
        self._shares = shares
        self._max_names = max_names
        self._digests = PrefixDigests(STRIDE)
        self._lives: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def salt(self, tenant: str) -> str:
        """What keeps the tenant's prompts apart from others in the workers' caches."""
        return "" if self._shares else tenant

    def names(self, token_ids: Sequence[int], tenant: str) -> list[bytes]:
        """Names of the prompt's beginnings, for `cached_tokens` and `learn`."""
        return self._digests.chain(token_ids, self.salt(tenant))

    def cached_tokens(self, names: Iterable[bytes], views: Iterable[WorkerView]) -> dict[str, int]:
        """How many of its tokens those of `views` should have, by incarnation; of the 8 that have the most."""
        live = {view.record.incarnation for view in views}
        found: dict[str, int] = {}
        for index, name in enumerate(names):
            here = [life for life in self._lives.get(name, ()) if life in live and found.get(life, 0) == index]
            if not here:
                break
            found |= dict.fromkeys(here, index + 1)
        most = sorted(found, key=lambda life: (-found[life], life))[:_MAX_WORKERS]
        return {life: found[life] * STRIDE for life in most}

    def learn(self, names: Sequence[bytes], worker: WorkerRecord) -> None:
        """Takes note that the worker has computed a prompt."""
        if not worker.caches_prefixes:
            return
        life = worker.incarnation
        # The end first, so that it is forgotten before what it builds on.
        for name in reversed(names):
            others = [each for each in self._lives.pop(name, ()) if each != life]
            self._lives[name] = (life, *others[: _MAX_WORKERS - 1])
        while len(self._lives) > self._max_names:
            self._lives.popitem(last=False)
