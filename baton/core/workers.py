"""What gateways know of workers, and what a request needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.core.model import ModelFingerprint


class WorkerRole(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    """Whether a worker takes new requests."""

    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker as it describes itself in a heartbeat.

    `num_blocks` is the whole KV pool, `max_num_seqs` the most prompts or outputs at a time. The numbers that follow
    `caches_prefixes` are gauges for people; credit is counted by grants, not by them. For people are `device` and what
    computes `attention` there, too. `converts_dtype`: a decode worker that takes KV caches of another element type, or
    of otherwise quantized weights, over. `caches_prefixes`: a prefill worker that keeps what it has computed for later
    prompts.
    """

    worker_id: str
    incarnation: str
    role: WorkerRole
    state: WorkerState
    address: str
    host_id: str
    fingerprint: ModelFingerprint
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_context_tokens: int
    converts_dtype: bool = False
    caches_prefixes: bool = False
    num_waiting: int = 0
    num_running: int = 0
    num_used_blocks: int = 0
    device: str = ""
    attention: str = ""


# Not frozen: one is made for every worker with every admission, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class WorkerView:
    """One worker with the credit that grants have taken of it, as seen in one moment.

    `granted_tokens`: what it is expected to compute for the prompts of those grants.
    """

    record: WorkerRecord
    granted_blocks: int
    granted_seqs: int
    heartbeat_age_s: float
    granted_tokens: int = 0

    @property
    def free_blocks(self) -> int:
        """Blocks that no grant holds."""
        return self.record.num_blocks - self.granted_blocks

    @property
    def free_seqs(self) -> int:
        """Sequence slots that no grant holds."""
        return self.record.max_num_seqs - self.granted_seqs


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request's place in the queue. Holds no prompt.

    Tenants of a class take turns; `priority` (-10 to 10, higher first) orders the tickets of one tenant only.
    It takes the memory of the prompt once and of each of `num_choices` outputs of `max_tokens`.
    `max_wait_s` is how long it can wait for workers: it is refused when it would wait longer, and dropped when it has.
    `avoids` has the lives of workers (incarnations) that failed an earlier attempt at the request. `cached` has, by
    life, how many of the prompt's tokens a prefill worker should have computed already.
    """

    attempt_id: str
    request_id: str
    queue_class: str
    prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    tenant: str = "default"
    priority: int = 0
    max_wait_s: float | None = None
    avoids: frozenset[str] = frozenset()
    cached: Mapping[str, int] = field(default_factory=dict)

    def uncached_tokens(self, worker: WorkerRecord) -> int:
        """What a prefill worker should have to compute."""
        return self.prompt_tokens - self.cached.get(worker.incarnation, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which pair serves a ticket, and the credit that it takes: blocks on each side.

    `prefill_tokens` is what the prefill worker is expected to compute. On the decode side it takes a sequence slot for
    each of the ticket's choices.
    """

    prefill_id: str
    decode_id: str
    prefill_blocks: int
    decode_blocks: int
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A pair of workers that hold credit for one ticket."""

    attempt_id: str
    prefill: WorkerRecord
    decode: WorkerRecord
    queue_s: float
