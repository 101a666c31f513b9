"""How records and tickets are written in Redis."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from baton.core.model import ModelFingerprint
from baton.core.workers import Grant, Route, Ticket, WorkerRecord, WorkerRole, WorkerState, WorkerView

if TYPE_CHECKING:
    from collections.abc import Sequence


def encode_record(record: WorkerRecord) -> str:
    """The record as JSON."""
    fields = asdict(record)
    fields["role"] = record.role.value
    fields["state"] = record.state.value
    return json.dumps(fields, separators=(",", ":"))


# Records change once a second and are read with each admission.
@lru_cache(maxsize=1024)
def decode_record(raw: str) -> WorkerRecord:
    """The record of `encode_record`. Fields that a newer worker added are passed over."""
    fields = json.loads(raw)
    known = {name: fields[name] for name in WorkerRecord.__dataclass_fields__ if name in fields}
    known["role"] = WorkerRole(known["role"])
    known["state"] = WorkerState(known["state"])
    known["fingerprint"] = _fingerprint(**known["fingerprint"])
    return WorkerRecord(**known)


# Workers of one deployment share theirs, and routing looks into the same object once.
@lru_cache(maxsize=64)
def _fingerprint(**fields: str) -> ModelFingerprint:
    return ModelFingerprint(**fields)


def decode_views(rows: Sequence[Sequence[str | int]]) -> tuple[WorkerView, ...]:
    """The rows of `views()` in common.lua: record, age of the heartbeat in ms, blocks, sequences and tokens granted."""
    return tuple(
        [  # a generator would take longer than what it makes
            WorkerView(
                record=decode_record(str(raw)),
                granted_blocks=int(blocks),
                granted_seqs=int(seqs),
                heartbeat_age_s=int(age_ms) / 1000,
                granted_tokens=int(tokens),
            )
            for raw, age_ms, blocks, seqs, tokens in rows
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The ticket that a class serves next. Lower `turn` first, then lower `order`.

    For `standstill_s` the class has granted nothing though somebody waited.
    """

    ticket: Ticket
    num_prefills: int
    turn: float
    order: int
    standstill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Credit that is kept free for one ticket of so many choices: other grants leave it alone."""

    attempt_id: str
    route: Route
    num_choices: int = 1

    def hide_from(self, views: Sequence[WorkerView]) -> list[WorkerView]:
        """The workers as other tickets see them: what is kept is taken."""
        kept = {
            self.route.prefill_id: (self.route.prefill_blocks, 1),
            self.route.decode_id: (self.route.decode_blocks, self.num_choices),
        }
        return [
            replace(
                view,
                granted_blocks=view.granted_blocks + kept[view.record.worker_id][0],
                granted_seqs=view.granted_seqs + kept[view.record.worker_id][1],
            )
            if view.record.worker_id in kept
            else view
            for view in views
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The heads of all classes, the live workers and what is kept at one moment. No heads: nobody waits."""

    heads: tuple[Head, ...]
    views: tuple[WorkerView, ...]
    taken_us: int
    reservation: Reservation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantMessage:
    """A grant as its ticket's owner is told of it."""

    gateway_id: str
    grant: Grant
    route: Route


def encode_ticket(ticket: Ticket, gateway_id: str) -> dict[str, Any]:
    """The ticket's fields as the scripts name them."""
    optional: dict[str, Any] = {}
    if ticket.max_wait_s is not None:
        optional["max_wait_ms"] = round(ticket.max_wait_s * 1000)
    if ticket.avoids:  # Lua cannot tell an empty list from an empty object
        optional["avoids"] = sorted(ticket.avoids)
    if ticket.cached:
        optional["cached"] = dict(ticket.cached)
    return optional | {
        "request_id": ticket.request_id,
        "class": ticket.queue_class,
        "prompt_tokens": ticket.prompt_tokens,
        "max_tokens": ticket.max_tokens,
        "num_choices": ticket.num_choices,
        "tenant": ticket.tenant,
        "priority": ticket.priority,
        "gateway": gateway_id,
    }


def decode_snapshot(reply: Sequence[Any]) -> Snapshot | None:
    """The reply of `snapshot()` in common.lua; None for its empty form."""
    if not reply:
        return None
    heads, views, taken_us, kept = reply
    return Snapshot(
        heads=tuple(_decode_head(row) for row in heads),
        views=decode_views(views),
        taken_us=int(taken_us),
        reservation=_decode_reservation(kept) if kept else None,
    )


def decode_grant(message: str) -> GrantMessage:
    """The reply of `grant_message()` in common.lua."""
    fields = json.loads(message)
    prefill, decode = decode_record(fields["prefill"]), decode_record(fields["decode"])
    return GrantMessage(
        gateway_id=fields["gateway"],
        grant=Grant(
            attempt_id=fields["attempt_id"], prefill=prefill, decode=decode, queue_s=max(0, fields["queue_ms"]) / 1000
        ),
        route=Route(
            prefill_id=prefill.worker_id,
            decode_id=decode.worker_id,
            prefill_blocks=int(fields["prefill_blocks"]),
            decode_blocks=int(fields["decode_blocks"]),
            prefill_tokens=int(fields["prefill_tokens"]),
        ),
    )


def _decode_reservation(raw: str) -> Reservation:
    fields = json.loads(raw)
    return Reservation(
        attempt_id=fields["attempt"],
        route=Route(
            prefill_id=fields["prefill"]["id"],
            decode_id=fields["decode"]["id"],
            prefill_blocks=int(fields["prefill"]["blocks"]),
            decode_blocks=int(fields["decode"]["blocks"]),
        ),
        num_choices=int(fields["decode"].get("seqs", 1)),
    )


def _decode_head(row: Sequence[Any]) -> Head:
    attempt_id, raw, num_prefills, turn, standstill_ms = row
    fields = json.loads(raw)
    return Head(
        ticket=Ticket(
            attempt_id=attempt_id,
            request_id=fields["request_id"],
            queue_class=fields["class"],
            prompt_tokens=int(fields["prompt_tokens"]),
            max_tokens=int(fields["max_tokens"]),
            num_choices=int(fields.get("num_choices", 1)),
            tenant=fields["tenant"],
            priority=int(fields["priority"]),
            avoids=frozenset(fields.get("avoids", ())),
            cached={life: int(tokens) for life, tokens in fields.get("cached", {}).items()},
        ),
        num_prefills=num_prefills,
        turn=float(turn),
        order=int(fields["order"]),
        standstill_s=int(standstill_ms) / 1000,
    )
