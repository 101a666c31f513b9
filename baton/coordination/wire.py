"""How records and tickets are written in Redis."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING

from baton.core.model import ModelFingerprint
from baton.core.workers import WorkerRecord, WorkerRole, WorkerState, WorkerView

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
    known["fingerprint"] = ModelFingerprint(**known["fingerprint"])
    return WorkerRecord(**known)


def decode_views(rows: Sequence[Sequence[str | int]]) -> tuple[WorkerView, ...]:
    """The rows of `views()` in common.lua: record, age of the heartbeat in ms, blocks and sequences granted."""
    return tuple(
        WorkerView(
            record=decode_record(str(raw)),
            granted_blocks=int(blocks),
            granted_seqs=int(seqs),
            heartbeat_age_s=int(age_ms) / 1000,
        )
        for raw, age_ms, blocks, seqs in rows
    )
