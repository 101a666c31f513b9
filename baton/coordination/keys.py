"""Every Redis key and channel, in one place.

All keys of one model share one hash tag, so that they lie on one node of a cluster and one script can touch
them all. Their number is fixed: what grows lies inside them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one model in one namespace. Scripts get `all` as KEYS; `scripts/common.lua` names them again."""

    namespace: str
    model: str

    @property
    def _tag(self) -> str:
        return f"{{{self.namespace}:{self.model}}}"

    @property
    def all(self) -> list[str]:
        """All keys, in the order in which `scripts/common.lua` reads them."""
        return [
            f"{self._tag}:epoch",  # string: names this life of the database
            f"{self._tag}:workers",  # hash: worker id -> record as JSON
            f"{self._tag}:beats",  # sorted set: worker id by time of the last heartbeat, ms
            f"{self._tag}:retired",  # sorted set: worker id and incarnation that may not come back, by time, ms
            f"{self._tag}:credit",  # hash: worker id with :blocks, :seqs or :tokens -> what grants hold of it
            f"{self._tag}:tickets",  # hash: attempt id -> ticket as JSON, from admission to the end
            f"{self._tag}:requests",  # hash: request id -> its live attempt id
            f"{self._tag}:queue",  # sorted set by name: class|tenant|priority|order|attempt id of each waiting ticket
            f"{self._tag}:grants",  # hash: attempt id -> grant as JSON
            f"{self._tag}:leases",  # sorted set: attempt id by end of its lease, ms
            f"{self._tag}:load",  # hash: sums, rates and turns of the classes
            f"{self._tag}:seats",  # hash: class|tenant with waiting tickets -> its place in the class's turns
            f"{self._tag}:turns",  # sorted set by name: class|seat|tenant, the order of the turns
            # Never written. A cluster's node whose slot is on the way to another one begins no script of which a key is
            # absent; one with all its keys would fail in its middle, at the first that it has just emptied.
            f"{self._tag}:absent",
        ]

    @property
    def wake_channel(self) -> str:
        """Told when blocked heads may have got credit; any gateway may act."""
        return f"{self._tag}:wake"

    def gateway_channel(self, gateway_id: str) -> str:
        """Told what other gateways granted to the tickets of this one."""
        return f"{self._tag}:gateway:{gateway_id}"
